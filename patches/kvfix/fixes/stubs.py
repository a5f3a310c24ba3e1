"""Stubs for behaviour probes: LMCache's in-process adapter in the scheduler role, its lookup client, a request, a step.

The module imports nothing: a probe runs in a production engine.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

NAME = "kvfix-probe"


def cannot_tell(hook: Callable[..., Any], module: ModuleType) -> NoReturn:
    """The probe of a bug that no stub can show in milliseconds: it takes a full cache, a wait, or another process."""
    raise NotImplementedError("no probe for this fix")


def scheduler_side(**more: Any) -> Any:
    """The attributes that `LMCacheConnectorV1Impl` of any release reads in the scheduler; `more` adds or replaces."""
    config = SimpleNamespace(
        save_decode_cache=False,
        priority_limit=None,
        min_retrieve_tokens=0,
        get_extra_config_value=lambda name, default: default,
    )
    attributes: dict[str, Any] = {
        "kv_role": "kv_both",
        "force_skip_save": False,
        "async_loading": False,
        "skip_last_n_tokens": 0,
        "lookup_client": object(),
        "lmcache_engine": None,
        "config": config,
        "load_specs": {},
        "_requests_priority": {},
        "_request_trackers": {},
        "_unfinished_requests": {},
        "_save_decode_cache": False,
        "_discard_partial_chunks": True,
        "_block_size": 16,
        "_lmcache_chunk_size": 256,
        "_max_tokens_per_load": 0,
    }
    return SimpleNamespace(**{**attributes, **more})


def lookup_client(hit: int) -> Any:
    """A lookup client that returns this hit, also from its cache."""
    return SimpleNamespace(lookup_cache=lambda lookup_id: hit, lookup=lambda *_, **__: hit)


def request(num_tokens: int, **more: Any) -> Any:
    """A request of vLLM's scheduler."""
    attributes: dict[str, Any] = {
        "request_id": NAME,
        "num_tokens": num_tokens,
        "all_token_ids": [0] * num_tokens,
        "prompt_token_ids": [0] * num_tokens,
        "prompt_embeds": None,
        "num_computed_tokens": 0,
        "priority": 0,
        "status": None,
        "kv_transfer_params": None,
        "sampling_params": SimpleNamespace(extra_args=None),
        "mm_features": [],
        "mm_hashes": [],
    }
    return SimpleNamespace(**{**attributes, **more})


def step(
    tokens: int, *, new: Any = None, computed: int = 0, blocks: list[int] | None = None, resumed: bool = False
) -> Any:
    """A scheduler output with one request: `new`, or a cached one with `computed` tokens.

    blocks: new blocks of a cached request. resumed: it was preempted.
    """
    known = [] if new is not None else [NAME]
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=[] if new is None else [new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=known,
            num_computed_tokens=[computed for _ in known],
            new_block_ids=[None if blocks is None else (blocks,)],
            resumed_req_ids=set(known) if resumed else set(),
            resumed_from_preemption=[resumed],
        ),
        num_scheduled_tokens={NAME: tokens},
    )
