"""Loaded requests wait for each other for ever: vLLM reserves too few blocks for a model with a sliding window.

Symptom: The log has `Running: 0 reqs, Waiting: N reqs` for ever, no throughput, no error. The model has layers of full
attention and of sliding windows (Gemma, gpt-oss), the connector loads between steps, and the KV cache is nearly full.

Cause: In a sliding window, a request holds at most `max_admission_blocks_per_request` blocks at once. From this limit,
vLLM subtracts the length of the request's block list. The result is the number of blocks that the request may still
need (`get_num_blocks_to_allocate`, v1/core/single_type_kv_cache_manager.py 0.32.0:215-253). The list includes the null
blocks in front of the window, even the null blocks of a hit. For a hit longer than the limit, the result is 0.

vLLM admits a new load if the load fits into the blocks that are free and not reserved for loads in flight (scheduler.py
0.32.0:1249). A loaded request holds its blocks until it runs. Each loaded request may then need more blocks than are
free, while other loaded requests hold the missing blocks.

Fix: The fix calls `get_num_blocks_to_allocate` without the limit. The fix then returns at most the limit minus the
number of blocks that the request uses. The fix wraps only the two managers that recycle blocks. If 256 requests ran, a
wrapper in the base class of the managers would take a twelfth of the scheduler's time.
- Releases: vLLM 0.20.2 to 0.33.0. Before 0.26, vLLM uses the limit only to check that a whole request fits.
- Upstream: None known. For the reason why vLLM has the limit, see https://github.com/vllm-project/vllm/issues/39734.
- Remove when: `get_num_blocks_to_allocate` subtracts no null blocks from the limit.
"""

import functools
import inspect
from collections.abc import Callable, Generator
from types import ModuleType

from kvfix.fixes.api import CHUNKED_LOCAL_MANAGER, SLIDING_WINDOW_MANAGER, Any, Fix, around, note, replaced, stubs

#: Names of the manager's attribute that holds the limit: the name in 0.32.0, and the name up to 0.26.0.
_LIMITS = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")


def fix(module: ModuleType) -> Callable[..., Any]:
    applies = _place(module.SlidingWindowManager.get_num_blocks_to_allocate)

    def get_num_blocks_to_allocate(
        manager: Any, request: str, tokens: int, hit: Any, computed: int, *_: Any, **__: Any
    ) -> Generator[None, int, int]:
        names = [each for each in _LIMITS if hasattr(manager, each)]
        limit: int = getattr(manager, names[0])
        with replaced(manager, **dict.fromkeys(names)):
            needed = yield
        reserved = min(needed, max(0, limit - _in_use(manager, request, hit, computed)))
        if reserved > limit - len(manager.req_to_blocks.get(request, ())) - len(hit):  # vLLM subtracts these lengths
            note(__name__, f"request {request}: {reserved} blocks are reserved")
        return reserved

    wrap = around(
        get_num_blocks_to_allocate,
        when=lambda manager, *given, **_: given[applies] and any(getattr(manager, name, 0) for name in _LIMITS),
    )

    def wrap_limited(function: Callable[..., int]) -> Callable[..., int]:
        limited = wrap(function)

        @functools.wraps(function)
        def wrapper(manager: Any, *args: Any, **more: Any) -> int:
            # vLLM calls the function for each request and KV group in each step. Only an admission has a limit.
            call = limited if more.get("apply_admission_cap", True) else function
            return call(manager, *args, **more)

        return wrapper

    return wrap_limited


def _place(function: Callable[..., Any]) -> int:
    """Return the position of `apply_admission_cap` among the arguments. The position differs between releases."""
    names = list(inspect.signature(function).parameters)
    return names.index("apply_admission_cap") - 1 if "apply_admission_cap" in names else -1


def _in_use(manager: Any, request: str, hit: Any, computed: int) -> int:
    """Count the request's blocks after the last null block. If no block is null, add the hit's blocks in use."""
    held, skipped = 0, manager.get_num_skipped_tokens(computed) // manager.block_size
    for block in reversed(manager.req_to_blocks.get(request, ())):
        if block.is_null:
            return held
        held += 1
    return held + sum(1 for block in hit[skipped:] if not block.is_null and block.ref_cnt > 0)


def shows_bug(hook: Any, module: Any) -> bool:
    """Reserve blocks for 256 tokens, before and after a load of 192 tokens. The bug reserves too few blocks."""
    null, block = (stubs.Stub(is_null=each, ref_cnt=1) for each in (True, False))
    manager = module.SlidingWindowManager.__new__(module.SlidingWindowManager)
    lists: dict[str, Any] = {"req_to_blocks": {}, "num_cached_block": {}}
    window = {"block_size": 16, "sliding_window": 16, "extra_retained_tokens": 0}
    vars(manager).update(lists, **window, **dict.fromkeys(_LIMITS, 10))
    more = {"num_local_computed_tokens": 0} if "num_local_computed_tokens" in inspect.signature(hook).parameters else {}
    more.update(total_computed_tokens=192, num_tokens_main_model=256, apply_admission_cap=True)
    before = hook(manager, stubs.NAME, 256, [], **more)
    lists["req_to_blocks"][stubs.NAME], lists["num_cached_block"][stubs.NAME] = [null] * 11 + [block], 12
    return bool(before < 5 or hook(manager, stubs.NAME, 256, [], **more) < 4)


FIX = Fix(
    SLIDING_WINDOW_MANAGER.get_num_blocks_to_allocate(broken=">=0.20.2", probe=shows_bug, fix=fix),
    CHUNKED_LOCAL_MANAGER.get_num_blocks_to_allocate(broken=">=0.20.2", probe=shows_bug, fix=fix),
    effect="hang",
    evidence={"KVD202": ""},
    scenarios=("mp-window-reserves-too-little",),
)
