"""An idle engine never rests: with `lazy_offload` SimpleCPUOffloadConnector stores the same blocks again and again.

## Symptom
Nothing is logged. EngineCore takes a whole core and the GPU copies without a request, after more prompts than
`cpu_bytes_to_use` holds; `vllm:simple_kv_offload_pending_store_blocks` never comes to 0.

## Cause
In each step `lazy_offload` stores cached blocks of the GPU's free list that the CPU memory does not have
(manager.py 0.32.0:590-640). A block that is stored goes to the end of that list and is looked at again. Where the list
has more than the CPU memory holds, the next ones have evicted it by then, so it is stored again. A store in flight
makes EngineCore go on with steps (`has_pending_push_work`), and each of them stores.

## Fix
From the last step that computes something on, no more is stored than the CPU memory holds.

## Releases
vLLM 0.32.0 and 0.33.0, the first ones played.

## Upstream
None known.

## Remove when
`_prepare_lazy_store_specs` stores no block again that it has stored since it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

from kvfix.fixes import stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import SIMPLE_SCHEDULER
from kvfix.wrapping import around, instead

#: Of the scheduler: blocks stored since the last step that computes something.
_STORED = "_kvfix_stored_at_rest"


def fix(module: ModuleType) -> Callable[..., Any]:
    def prepare_store_specs(scheduler: Any, output: Any) -> Generator[None, Any, Any] | None:
        if output.total_num_scheduled_tokens:
            setattr(scheduler, _STORED, 0)
            return None
        if getattr(scheduler, _STORED, 0) >= scheduler.num_cpu_blocks - 1:  # one is the null block
            return instead(([], [], [], None))
        return _counted(scheduler)

    return around(prepare_store_specs, when=lambda scheduler, *_, **__: scheduler._lazy_mode)


def _counted(scheduler: Any) -> Generator[None, Any, Any]:
    answer = yield
    setattr(scheduler, _STORED, getattr(scheduler, _STORED, 0) + len(answer[0]))
    return answer


FIX = Fix(
    __name__,
    __doc__,
    effect="hang",
    targets=(SIMPLE_SCHEDULER.prepare_store_specs(broken=">=0.32", probe=stubs.cannot_tell, fix=fix),),
    evidence={},
    scenarios=("simple-offload-never-rests",),
    no_patch={"vllm": "what lazy_offload is to store while nothing runs is for vLLM to decide"},
)
