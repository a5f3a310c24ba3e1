"""Valid and invalid `kv_transfer_params` of a request, by connector."""

from __future__ import annotations

from typing import Any

#: For LMCache's in-process connector: store nothing, or send the KV to a decoder.
OF_LMCACHE: dict[str, dict[str, Any]] = {
    "skip_save": {"lmcache.skip_save": True},
    "prefill": {
        "ret_first_tok": True,
        "disagg_spec": {
            "req_id": "r", "receiver_host": "decoder", "receiver_init_port": [1], "receiver_alloc_port": [2]
        },
    },
}  # fmt: skip
#: For vLLM's OffloadingConnector.
OF_OFFLOADING: dict[str, dict[str, Any]] = {
    "load_little": {"max_load_tokens": 40},
    "load_nothing": {"max_load_tokens": 0},
    "store_little": {"max_offload_tokens": 40},
    "store_nothing": {"max_offload_tokens": 0},
    "load_of_cpu": {"kv_load_tiers": [{"medium": "cpu"}]},
    # invalid values
    "limits_of_no_kind": {"max_load_tokens": "40", "max_offload_tokens": -1},
    "limits_as_flags": {"max_load_tokens": True, "max_offload_tokens": 1.5},
    "limits_beyond_all": {"max_load_tokens": 1 << 60, "max_offload_tokens": 1 << 60},
    "tiers_in_no_list": {"kv_load_tiers": "cpu"},
    "tiers_of_no_kind": {"kv_load_tiers": [3, {"medium": 7}, {"medium": "cpu", "locality": []}, {}]},
    "tiers_of_nothing": {"kv_load_tiers": []},
    "of_another_connector": {"do_remote_prefill": True, "do_remote_decode": True, "remote_block_ids": []},
}
CONFIGURED = {**OF_LMCACHE, **OF_OFFLOADING}
