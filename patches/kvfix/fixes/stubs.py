"""Stubs for probes: LMCache's in-process adapter and lookup client, a request, a step.

A probe calls an installed function to find out whether the function has a bug. A stub has only the attributes that the
function reads. In most functions below, `more` adds or replaces attributes. This module imports nothing that the engine
has not imported, because a probe runs in a production engine.
"""

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "kvfix-probe"
Stub = SimpleNamespace


def raises(error: Any, hook: Callable[..., Any], *args: Any, text: str = "", **kw: Any) -> bool:
    """Return True if the call raises this error with this text. Other errors propagate, and kvfix refuses the fix."""
    try:
        hook(*args, **kw)
    except error as raised:
        if text in str(raised):
            return True
        raise
    return False


class Nothing:
    """An object whose methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Calls(list[Any]):
    """Records each call as (args, kwargs). A call returns `answer`, or raises `answer` if `answer` is an exception."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.append((args, kwargs))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def stub(more: dict[str, Any], **attributes: Any) -> Any:
    return SimpleNamespace(**{**attributes, **more})


def scheduler_side(**more: Any) -> Any:
    """Return a stub of `LMCacheConnectorV1Impl` in the scheduler."""
    config = SimpleNamespace(
        save_decode_cache=False, priority_limit=None, min_retrieve_tokens=0,
        get_extra_config_value=lambda name, default: default,
    )  # fmt: skip
    return stub(
        more, kv_role="kv_both", force_skip_save=False, async_loading=False, skip_last_n_tokens=0,
        lookup_client=object(), lmcache_engine=None, config=config, load_specs={}, _requests_priority={},
        _request_trackers={}, _unfinished_requests={}, _save_decode_cache=False, _discard_partial_chunks=True,
        _block_size=16, _lmcache_chunk_size=256, _max_tokens_per_load=0,
    )  # fmt: skip


def scheduled(adapter: ModuleType, total: int, tracked: int, computed: int, **more: Any) -> tuple[Any, Any]:
    """Return a `scheduler_side` with one request of `total` tokens, and the tracker of this request.

    tracked: number of tokens in the tracker. computed: number of computed tokens. more: as in `scheduler_side`.
    """
    tracker = adapter.RequestTracker(NAME, total, [0] * tracked, list(range(-(-total // 16))))
    known = request(total, num_computed_tokens=computed)
    return scheduler_side(_request_trackers={NAME: tracker}, _unfinished_requests={NAME: known}, **more), tracker


def worker_side(adapter: ModuleType, meta: Any, **more: Any) -> Any:
    """Return a stub of LMCache's adapter in a worker, in a step with the metadata `meta` of one request."""
    step = adapter.LMCacheConnectorMetadata()
    step.requests = [meta]
    return stub(
        more, kv_role="kv_both", use_layerwise=False, enable_blending=False, kv_caches={"layer": None},
        config=SimpleNamespace(), device="cpu", _lmcache_chunk_size=16, _block_size=16, current_layer=0,
        layerwise_storers=[], _layerwise_save_storers={}, _stats_monitor=Nothing(),
        _recent_load_errors=(),  # patches/upstream/failed-load-poisons-cache adds this attribute
        _parent=SimpleNamespace(_connector_metadata=step, _get_connector_metadata=lambda: step),
    )  # fmt: skip


def metadata(tokens: int, **more: Any) -> Any:
    """Return a request's metadata for a worker. The tokens begin in block 3."""
    import torch  # the adapter has already imported torch

    return stub(
        more, req_id=NAME, token_ids=[0] * tokens, slot_mapping=torch.arange(48, 48 + tokens), load_spec=None,
        save_spec=None, disagg_spec=None, is_last_prefill=True, request_configs=None,
    )  # fmt: skip


def async_lookup_client(**more: Any) -> Any:
    """Return a stub of LMCacheAsyncLookupClient that has a lookup in flight."""
    return stub(
        more, lock=threading.Lock(), reqs_status={NAME: None}, first_lookup_time={}, lookup_backoff_time=0,
        aborted_lookups=set(), timeout_ms=3000, config=SimpleNamespace(lookup_timeout_ms=3000), world_size=1,
        _cleanup_finished_aborted_lookups=lambda: None,
    )  # fmt: skip


def lookup_client(hit: int) -> Any:
    return SimpleNamespace(lookup_cache=lambda lookup_id: hit, lookup=lambda *_, **__: hit)


def request(num_tokens: int, **more: Any) -> Any:
    return stub(
        more, request_id=NAME, num_tokens=num_tokens, num_prompt_tokens=num_tokens, all_token_ids=[0] * num_tokens,
        prompt_token_ids=[0] * num_tokens, prompt_embeds=None, block_hashes=[b""] * (num_tokens // 16),
        num_computed_tokens=0, cache_salt=None, lora_request=None, skip_reading_prefix_cache=False, priority=0,
        status=None, kv_transfer_params=None, sampling_params=SimpleNamespace(extra_args=None), mm_features=[],
        mm_hashes=[],
    )  # fmt: skip


def step(
    tokens: int = 0, *, new: Any = None, computed: int = 0, blocks: list[int] | None = None, resumed: bool = False
) -> Any:
    """Return a scheduler output with one request: the request `new`, or a cached request if `new` is None.

    With 0 tokens, the output has no cached request.
    computed: number of computed tokens of the cached request. blocks: new blocks of the cached request.
    resumed: True if the step resumes the cached request.
    """
    known = [NAME] if tokens and new is None else []
    cached = SimpleNamespace(
        req_ids=known, num_computed_tokens=[computed for _ in known], resumed_req_ids=set(known) if resumed else set(),
        new_block_ids=[None if blocks is None else (blocks,) for _ in known],
    )  # fmt: skip
    return SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=[] if new is None else [new], scheduled_cached_reqs=cached,
        num_scheduled_tokens={NAME: tokens} if tokens else {}, total_num_scheduled_tokens=tokens,
        preempted_req_ids=set(),
    )  # fmt: skip
