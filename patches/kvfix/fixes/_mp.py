"""Code that the fixes for the multi-process connectors share. LMCache's class and vLLM's copy have the same hooks.

Since 0.4.7, LMCache's request trackers count tokens. Trackers count blocks in LMCache up to 0.4.6, in LMCache's
connectors for older vLLM and in vLLM's copy.
"""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType

from kvfix.fixes.api import LMCACHE_MP, VLLM_MP, Any, Probe, stubs


def tokens(tracker: Any, name: str, block_size: int = 16) -> int:
    """Return the tracker's count `name` in tokens, for example `num_stored`. The default block size is for probes."""
    found = getattr(tracker, f"{name}_tokens", None)
    return int(found if found is not None else getattr(tracker, f"{name}_blocks") * block_size)


def hits(connector: Any, tracker: Any) -> tuple[int, int]:
    """Return `num_vllm_hit` and `num_lmcache_hit` in tokens, faster than two calls of `tokens`."""
    blocks = getattr(tracker, "num_vllm_hit_blocks", None)
    if blocks is None:
        return tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens
    return blocks * connector.vllm_block_size, tracker.num_lmcache_hit_blocks * connector.vllm_block_size


def is_in(connector: Any, request: Any, state: str) -> bool:
    """Return True if the request has a tracker in this state. Fixes use this function in `when`."""
    tracker = connector.request_trackers.get(request.request_id)
    return tracker is not None and tracker.state.name == state


def set_tokens(tracker: Any, name: str, value: int, block_size: int = 16) -> None:
    if hasattr(tracker, f"{name}_tokens"):
        setattr(tracker, f"{name}_tokens", value)
    else:
        setattr(tracker, f"{name}_blocks", value // block_size)


def block_size(connector: Any) -> int:
    """Return the number of tokens in a block, or 1 for a connector that counts tokens and has no block size."""
    return int(getattr(connector, "vllm_block_size", 1))


def chunk_size(connector: Any) -> int:
    adapter = connector.scheduler_adapter
    if hasattr(adapter, "lmcache_tokens_per_chunk"):
        return int(adapter.lmcache_tokens_per_chunk)
    return int(adapter.num_blocks_per_chunk() * connector.vllm_block_size)


def token_ids(tracker: Any) -> list[int]:
    """Return the tokens that LMCache's keys hash. Since 0.5.4, these tokens can differ from the request's tokens."""
    return list(tracker.get_token_ids() if hasattr(tracker, "get_token_ids") else tracker.all_token_ids)


def nothing_cached(adapter: Any, request_id: str) -> None:
    """Set the lookup result of this request to 0, so that the client sends no lookup."""
    # Both changes are in one statement, so that no exception can occur between them.
    adapter._finished_lookup_results[request_id], _ = 0, adapter._pending_lookups.add(request_id)


def answer_in_flight(client: Any, answers: Mapping[str, Any]) -> int:
    """Answer the client's pending requests in place of the server, which is gone. Return the number of answers.

    answers: {operation: answer}. Requests of other operations stay pending. Call this function in the thread that calls
    `cancel_streams`.
    """
    gone = [uid for uid, (_, spec) in client.pending_futures.items() if spec.operation in answers]
    for uid in gone:
        future, spec = client.pending_futures.pop(uid)
        future.set_result(answers[spec.operation])
    return len(gone)


#: For probes: the argument `blocks` of `update_state_after_alloc`, with blocks for 512 tokens.
BLOCKS = stubs.Stub(get_block_ids=lambda: (list(range(32)),))


class Adapter:
    """A scheduler adapter for probes. Lookups find `found` tokens. `asked` records lookups and other method calls."""

    lmcache_tokens_per_chunk = 256
    is_healthy = True

    def __init__(self, found: int | None = 0) -> None:
        self.found = found
        self._pending_lookups: set[str] = set()
        self._finished_lookup_results: dict[str, int] = {}
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def check_lookup_result(self, request_id: str) -> int | None:
        return self._finished_lookup_results.get(request_id, self.found)

    def maybe_submit_lookup_request(self, request_id: str, *_: Any, **__: Any) -> None:
        if request_id not in self._pending_lookups:
            self.asked.append(("maybe_submit_lookup_request", (request_id,), {}))

    def num_blocks_per_chunk(self) -> int:
        return 16

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.asked.append((name, args, kwargs))

    def names(self) -> list[str]:
        return [name for name, _, _ in self.asked]


def scheduler_side(module: ModuleType, found: int | None = 0) -> Any:
    """Return a connector for probes of scheduler hooks, made without `__init__`."""
    # vLLM's module defines VLLM_MP and may import LMCACHE_MP too, so VLLM_MP comes first.
    owner = getattr(module, VLLM_MP.name, None) or getattr(module, LMCACHE_MP.name)
    connector = owner.__new__(owner)
    vars(connector).update(
        _role=None, request_trackers={}, scheduler_adapter=Adapter(found), vllm_block_size=16, lazy_offload=False,
        _abandoned_lookups={},  # mp-abort-before-alloc in patches/upstream adds this attribute
        _can_store=True, _save_decode_cache=False, _reserve_last_token_for_lookup=False, _hit_alignment_tokens=16,
        _group_tokens_per_block=[16], _mamba_relocation_window=0, _eager_prefetch=False,
        _connector_stats=stubs.Nothing(),
    )  # fmt: skip
    return connector


def tracked(module: ModuleType, request: Any, found: int | None = 0, **counts: int) -> tuple[Any, Any]:
    """Return, for probes, a connector and its tracker of this request. counts: counts of the tracker, in tokens."""
    connector, tracker = scheduler_side(module, found), module.LMCacheMPRequestTracker(request)
    connector.request_trackers[request.request_id] = tracker
    for name, count in counts.items():
        set_tokens(tracker, name, count)
    return connector, tracker


def looks_up(**more: Any) -> tuple[Probe, Probe]:
    """Return probes of `get_num_new_matched_tokens` and `on_new_request`. more: attributes of the request.

    With the bug, the first hook promises the 512 cached tokens, and the second hook sends a lookup.
    """

    def finds(hook: Callable[..., Any], module: ModuleType) -> bool:
        return bool(hook(scheduler_side(module, found=512), stubs.request(2048, **more), 0)[0])

    def asks_on_arrival(hook: Callable[..., Any], module: ModuleType) -> bool:
        connector = scheduler_side(module)
        connector._eager_prefetch, connector._role = True, module.KVConnectorRole.SCHEDULER
        hook(connector, stubs.request(2048, resumable=False, **more))
        return "maybe_submit_lookup_request" in connector.scheduler_adapter.names()

    return finds, asks_on_arrival


def worker_side(**more: Any) -> Any:
    """Return a stub of the worker's adapter for probes. `more` adds or replaces attributes."""
    return stubs.stub(
        more, is_healthy=True, lazy_offload=False, dispatcher=None, instance_id=0, kv_caches={}, blocks_in_chunk=4,
        store_futures={}, store_events={}, finished_stores=set(), retrieve_futures={}, retrieve_events={},
        error_block_ids=set(), _dropped_retrieves=set(), _failed_request_ids=set(), _completed_store_requests={},
        _failed_store_requests=set(), _pending_store_kv_events={}, _process_finished_stores=lambda *_: set(),
        _ensure_heartbeat_started=lambda: None, _create_key=lambda *_, **__: None,
        _block_ids_per_group=lambda op: [op.block_ids],
    )  # fmt: skip


def get_finished(hook: Callable[..., Any], adapter: Any) -> Any:
    """Call `hook`, which is `get_finished`, in a probe. The number of parameters differs between releases."""
    return hook(adapter, *([set()] * (len(inspect.signature(hook).parameters) - 1)))


def is_left_unanswered(hook: Callable[..., Any], operation: str) -> bool:
    """Call `hook`, which is `cancel_streams`. Return True if a request in flight gets no answer."""
    answers: list[Any] = []
    future = stubs.Stub(set_result=answers.append, set_exception=answers.append)
    hook(stubs.Stub(pending_streams={}, pending_futures={0: (future, stubs.Stub(operation=operation))}))
    return not answers
