"""A load ends with the prompt, its last token is computed again, and a sliding window begins one token too late for it.

## Symptom
Wrong text without any message, of models with sliding windows (Gemma, gpt-oss) behind NixlConnector: of one in so many
prompts as a block has tokens, the first token is computed with other KV in place of one token of the window.

## Cause
Of a window vLLM keeps what the next token needs: after a prompt of P tokens, with a window of W, what begins at token
P - W + 1. The decode engine loads P tokens and computes the last one again, which needs token P - W. Where P - W + 1
is the edge of a block, neither engine has the block before it. Prefill frees it at the request's end (scheduler.py
0.32.0:3025), decode allocates none for the load (single_type_kv_cache_manager.py 0.32.0:350). It reads the null block.

## Fix
Both engines count one computed token less there: at the end of a request, and where a load reaches the end of one. The
block goes with the others. Not kept: what a prefill engine that generates more than one token has freed meanwhile.

## Releases
vLLM 0.15.1 to 0.33.0, by their code; NixlConnector takes windows since 0.20.2. Played: 0.32.0 and 0.33.0.

## Upstream
None known.

## Remove when
vLLM keeps and allocates what the prompt's last token needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import stubs
from kvfix.fixes.api import AT_START, Fix
from kvfix.fixes.targets import KV_CACHE_MANAGER
from kvfix.wrapping import around, before, replaced

#: Of a manager whose allocate_slots is wrapped.
MARK = "_kvfix_loads_whole_windows"
EXTERNAL, HIT = "num_external_computed_tokens", "num_new_computed_tokens"


def at_end(module: ModuleType) -> Callable[..., Any]:
    return around(_one_token_less)


def of_load(module: ModuleType) -> Callable[..., Any]:
    """Only a model with windows pays: allocate_slots of its manager is asked for each request in each step."""

    def get_computed_blocks(manager: Any, *_: Any) -> None:
        allocate_slots = manager.allocate_slots
        loads = around(_one_token_less)(lambda _, *args, **more: allocate_slots(*args, **more))

        @functools.wraps(allocate_slots)
        def wrapper(request: Any, *args: Any, **more: Any) -> Any:
            # vLLM names these two where there is a load.
            loaded = more.get(EXTERNAL)
            ends = loaded and request.num_computed_tokens + more.get(HIT, 0) + loaded >= request.num_tokens
            return loads(manager, request, *args, **more) if ends else allocate_slots(request, *args, **more)

        vars(manager).update({"allocate_slots": wrapper, MARK: True})

    return before(
        get_computed_blocks,
        when=lambda manager, *_: not hasattr(manager, MARK) and any(map(_is_window, _groups(manager))),
    )


def _one_token_less(manager: Any, *_: Any, **__: Any) -> Generator[None, Any, Any]:
    """Of the computed ones, where a window or a chunk of attention is asked what it skips."""
    with ExitStack() as windows:
        for each in filter(_is_window, _groups(manager)):
            windows.enter_context(replaced(each, get_num_skipped_tokens=_of_one_less(each.get_num_skipped_tokens)))
        answer = yield
    return answer


def _groups(manager: Any) -> Any:
    return manager.coordinator.single_type_managers


def _is_window(group: Any) -> bool:
    return hasattr(group, "sliding_window") or hasattr(group, "attention_chunk_size")


def _of_one_less(skipped: Callable[[int], int]) -> Callable[[int], int]:
    return lambda computed: skipped(max(0, computed - 1))


def frees_too_much(hook: Callable[..., Any], module: ModuleType) -> bool:
    """At the end of 32 computed tokens. Wrong is to free what the last of them needs."""
    manager, asked = _manager()
    hook(manager, stubs.NAME, 32)
    return asked != [16]


def allocates_too_few(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A load of 32 tokens, all that the request has. Wrong is to skip what the last of them needs."""
    manager, asked = _manager()
    manager.coordinator.remove_skipped_blocks = lambda *_, **__: None
    request = stubs.request(32, num_computed_tokens=0, num_in_flight_tokens=0, num_prompt_tokens=32, status=None)
    hook(manager, request, num_new_tokens=0, num_external_computed_tokens=32)
    return asked != [16]


def _manager() -> tuple[Any, list[int]]:
    """One whose window has 16 tokens, and how many tokens it was asked to skip."""
    asked: list[int] = []
    window = SimpleNamespace(sliding_window=16, get_num_skipped_tokens=lambda computed: computed - 15)

    def asks(*_: Any, **__: Any) -> int:
        asked.append(window.get_num_skipped_tokens(32))
        return 2

    coordinator = SimpleNamespace(
        single_type_managers=(window,), remove_skipped_blocks=asks, get_num_blocks_to_allocate=asks
    )
    manager = SimpleNamespace(
        coordinator=coordinator, max_model_len=64, watermark_blocks=0, retained_hit_group_ids=(),
        empty_kv_cache_blocks=SimpleNamespace(blocks=()), block_pool=SimpleNamespace(get_num_free_blocks=lambda: 0),
    )  # fmt: skip
    return manager, asked


FIX = Fix(
    __name__,
    __doc__,
    targets=(
        KV_CACHE_MANAGER.remove_skipped_blocks(broken=">=0.15", probe=frees_too_much, fix=at_end),
        KV_CACHE_MANAGER.allocate_slots(broken=">=0.15", probe=allocates_too_few, fix=None),
        KV_CACHE_MANAGER.get_computed_blocks(broken=">=0.15", probe=stubs.cannot_tell, fix=of_load, helper=True),
        KV_CACHE_MANAGER.get_computed_blocks_for_connector(
            broken=">=0.32", probe=stubs.cannot_tell, fix=of_load, helper=True
        ),
    ),
    evidence={},
    attaches=AT_START,
    scenarios=("nixl-window-freed-at-end",),
    no_patch={"vllm": "two ways are open: a window of one token more, or a load without the prompt's last token"},
)
