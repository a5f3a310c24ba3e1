"""A preempted request comes back, and its tracker shares its list of blocks with the worker: both add to it.

## Symptom
Nothing is logged. After preemptions (`Preemptions:` in vLLM's statistics), wrong text in the requests that were
preempted, and in others that begin with the same tokens, until the chunks are evicted.

## Cause
For a resumed request `RequestTracker.update` keeps the list of new blocks that the scheduler hands out (0.5.6
vllm_v1_adapter.py:245), and so does the worker (vLLM 0.32.0 v1/worker/gpu_model_runner.py:1428). With one worker, by
default in the scheduler's process (`uni`), it is the same list. Each step both add its new blocks to it (:1422): from
the second step on they are in it twice. The tracker's slots are then those of other tokens, and what lies there is
stored under valid keys. And where a request sits out a step, the worker fills its row of the block table from the list:
it reads, and writes to, the wrong blocks.

## Fix
The tracker of a resumed request gets a list of its own.

## Releases
LMCache 0.3.10 to 0.5.6 with vLLM's model runner V1. V2, which vLLM 0.32 takes for most models on a GPU, copies (and to
it a resumed request is a new one); so do the multi-process connectors.

## Upstream
None known.

## Remove when
LMCache copies the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import after
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def correct(adapter: ModuleType) -> Callable[..., Any]:
    def update(tracker: Any, answer: Any, tokens: Any, blocks: Any, preempted: bool = False, *_: Any, **__: Any) -> Any:
        tracker.allocated_block_ids = list(tracker.allocated_block_ids)
        return answer

    return after(update, when="preempted")


def shows_bug(hook: Callable[..., Any], adapter: ModuleType) -> bool:
    """Resumed with two blocks; the worker adds a third to its list of them. Wrong is a tracker that has it too."""
    tracker, blocks = adapter.RequestTracker(probe.NAME, 48, [0] * 16, [0]), [1, 2]
    tokens = {"all_token_ids": [0] * 48} if "all_token_ids" in hook.__code__.co_varnames else {}  # since 0.3.11
    hook(tracker, [0] * 16, (blocks,), True, **tokens)
    if tracker.allocated_block_ids != [1, 2]:
        raise ValueError(f"the probe expects [1, 2], got {tracker.allocated_block_ids!r}")
    blocks.append(3)
    return bool(tracker.allocated_block_ids != [1, 2])


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_v1_adapter",
            function="RequestTracker.update",
            broken=">=0.3.10",
            shows_bug=shows_bug,
            correct=correct,
        ),
    ),
)
