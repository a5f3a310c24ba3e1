"""Choose the reader of a connector's own state and metadata.

`kvfix.engine_state.reader` describes readers.
"""

from __future__ import annotations

from typing import Any

from kvfix.connector_events import peer_readers
from kvfix.connector_events.offload_readers import Offloading, SimpleOffload
from kvfix.engine_state import lmcache_readers
from kvfix.engine_state.reader import Reader


def reader(connector: Any) -> Reader:
    """Choose the reader by the connector's attributes: forks and copies have another name, but the same attributes."""
    found = lmcache_readers.reader(connector)
    if found is not None:
        return found
    if hasattr(getattr(connector, "connector_scheduler", None), "_generate_job_id"):
        return Offloading(connector)
    if hasattr(getattr(connector, "connector_worker", None), "_unsubmitted_store_jobs"):
        return Offloading(connector)
    if hasattr(connector, "scheduler_manager") and hasattr(connector, "worker_handler"):
        return SimpleOffload(connector)
    side = getattr(connector, "connector_scheduler", None) or getattr(connector, "connector_worker", None)
    if hasattr(side, "_nixl_handshake_listener_t") or hasattr(side, "nixl_wrapper"):
        return peer_readers.OF_NIXL.get(getattr(side, "_TRANSFER_MODE", ""), Reader)(connector)
    if hasattr(side, "_reqs_not_processed") or hasattr(side, "reqs_need_send"):
        return peer_readers.Mooncake(connector)
    return Reader(connector)


def model(connector: Any) -> tuple[int, bool]:
    """Return `replay` and `divergent` of `kvfix.ledger.events.Asked`, or their defaults if they cannot be read."""
    try:
        groups = getattr(getattr(connector, "_kv_cache_config", None), "kv_cache_groups", None) or ()
        replays = [int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0)) for group in groups]
        return max(replays, default=0), bool(getattr(connector, "supports_divergent_local_hybrid_hits", False))
    except Exception:  # noqa: BLE001  optional fields
        return 0, False


def sizes(connector: Any, reader: Reader) -> dict[str, Any]:
    """Return the sizes that the lab needs to replay the record; {} if they cannot be read."""
    try:
        config, settings = connector._vllm_config, reader.settings()
        cache, scheduler = config.cache_config, config.scheduler_config
        return {
            "block_size": int(cache.block_size),
            "num_blocks": int(cache.num_gpu_blocks),
            "prefix_caching": bool(cache.enable_prefix_caching),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_model_len": int(config.model_config.max_model_len),
            "chunk_size": int(settings.pop("chunk_size")),
            "lmcache": settings,
        }
    except Exception:  # noqa: BLE001  optional fields
        return {}
