"""What the fixes of the multi-process connector share: LMCache's class and vLLM's copy of it have the same hooks.

LMCache counts in tokens since 0.4.7; 0.4.6 and before, and vLLM's copy, count in blocks. So do two more for older vLLM
that LMCache 0.4.4 to 0.5.5 bring along, chosen by `kv_connector_module_path`: `lmcache_mp_connector_0180` and `_0201`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix.fix import Patch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

LMCACHE = ("lmcache", "lmcache.integration.vllm.lmcache_mp_connector", "LMCacheMPConnector")
FOR_0201 = (LMCACHE[0], LMCACHE[1] + "_0201", LMCACHE[2])
FOR_0180 = (LMCACHE[0], LMCACHE[1] + "_0180", LMCACHE[2])
IN_TREE = (
    "vllm",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
    "LMCacheMPConnectorUpstream",
)


def patches(
    function: str,
    shows_bug: Callable[[Callable[..., Any], ModuleType], bool],
    correct: Callable[[ModuleType], Callable[..., Any]],
    *,
    lmcache: str,
    vllm: str,
    for_0201: str = ">=0.4.5",
    for_0180: str = ">=0.4.4",
) -> tuple[Patch, ...]:
    """The same correction of a hook of all these classes, with the broken releases of each; "" where none is."""
    return tuple(
        Patch(dist, module, f"{owner}.{function}", broken, shows_bug, correct)
        for (dist, module, owner), broken in (
            (LMCACHE, lmcache),
            (IN_TREE, vllm),
            (FOR_0201, for_0201),
            (FOR_0180, for_0180),
        )
        if broken
    )


def tokens(tracker: Any, name: str, block_size: int = 16) -> int:
    """The tracker's `num_stored`, `num_vllm_hit` or `num_lmcache_hit` in tokens. Probes have blocks of 16 tokens."""
    found = getattr(tracker, f"{name}_tokens", None)
    return int(found if found is not None else getattr(tracker, f"{name}_blocks") * block_size)


def hits(connector: Any, tracker: Any) -> tuple[int, int]:
    """`num_vllm_hit` and `num_lmcache_hit` in tokens: what is read of every request that is admitted, in one call."""
    blocks = getattr(tracker, "num_vllm_hit_blocks", None)
    if blocks is None:
        return tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens
    return blocks * connector.vllm_block_size, tracker.num_lmcache_hit_blocks * connector.vllm_block_size


def in_state(name: str) -> str:
    """For `when` of a hook that is handed a request: it has a tracker, in the state that is known by this name."""
    trackers, request_id = "connector.request_trackers", "request.request_id"
    return f"{request_id} in {trackers} and {trackers}[{request_id}].state is {name}"


def set_tokens(tracker: Any, name: str, value: int, block_size: int = 16) -> None:
    """The opposite of `tokens`."""
    if hasattr(tracker, f"{name}_tokens"):
        setattr(tracker, f"{name}_tokens", value)
    else:
        setattr(tracker, f"{name}_blocks", value // block_size)


def block_size(connector: Any) -> int:
    """Only where trackers count in blocks does the connector keep it."""
    return int(getattr(connector, "vllm_block_size", 1))


def chunk_size(connector: Any) -> int:
    """Tokens of a chunk."""
    adapter = connector.scheduler_adapter
    if hasattr(adapter, "lmcache_tokens_per_chunk"):
        return int(adapter.lmcache_tokens_per_chunk)
    return int(adapter.num_blocks_per_chunk() * connector.vllm_block_size)


def token_ids(tracker: Any) -> list[int]:
    """The tokens that the keys are made of: from 0.5.4 on not always those of the request."""
    return list(tracker.get_token_ids() if hasattr(tracker, "get_token_ids") else tracker.all_token_ids)


def nothing_cached(adapter: Any, request_id: str) -> None:
    """The client answers 0 to the lookup of this request and sends none."""
    adapter._finished_lookup_results[request_id] = 0
    adapter._pending_lookups.add(request_id)


class Lock:
    """For probes: nobody else is there."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Adapter:
    """For probes: the scheduler's side of the client. It finds `found` tokens and keeps what it was asked to do."""

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
    """For probes: a connector that was never set up, with what its scheduler hooks read. Blocks of 16 tokens."""
    owner = getattr(module, IN_TREE[2], None) or getattr(module, LMCACHE[2])  # vLLM's module has LMCache's class too
    connector = owner.__new__(owner)
    vars(connector).update(
        _role=None,
        request_trackers={},
        _abandoned_lookups={},  # of patches/upstream/mp-abort-before-alloc
        scheduler_adapter=Adapter(found),
        vllm_block_size=16,
        lazy_offload=False,
        _can_store=True,
        _save_decode_cache=False,
        _reserve_last_token_for_lookup=False,
        _hit_alignment_tokens=16,
        _group_tokens_per_block=[16],
        _mamba_relocation_window=0,
        _eager_prefetch=False,
        _connector_stats=SimpleNamespace(record_lookup=lambda seconds: None),
    )
    return connector


def request(tokens: int = 2048, **more: Any) -> Any:
    """For probes: what the hooks read of a request."""
    ids = list(range(tokens))
    attributes = {
        "request_id": "kvfix-probe",
        "all_token_ids": ids,
        "prompt_token_ids": ids,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "block_hashes": [b""] * (tokens // 16),
        "cache_salt": None,
        "lora_request": None,
        "prompt_embeds": None,
        "skip_reading_prefix_cache": False,
        "kv_transfer_params": None,
        "sampling_params": None,
        "mm_features": [],
        "status": None,
    }
    return SimpleNamespace(**{**attributes, **more})
