"""Valid and invalid `kv_transfer_params` of a request, by connector."""

import copy
from collections.abc import Callable
from typing import Any

Params = dict[str, Any]

DECODER = {"req_id": "r", "receiver_host": "decoder", "receiver_init_port": [1], "receiver_alloc_port": [2]}
#: Parameters with which LMCache's in-process connector stores nothing, or sends the KV to a decoder.
OF_LMCACHE: dict[str, dict[str, Any]] = {
    "skip_save": {"lmcache.skip_save": True},
    "prefill": {"ret_first_tok": True, "disagg_spec": DECODER},
}
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


def _without(key: str) -> Callable[[Params], Params]:
    return lambda params: {name: value for name, value in params.items() if name != key}


def _with(**changed: Any) -> Callable[[Params], Params]:
    return lambda params: {**params, **copy.deepcopy(changed)}


def _blocks(changed: Callable[[list[Any]], Any]) -> Callable[[Params], Params]:
    """Return a function that changes the blocks of the first KV group, and leaves out all other groups."""
    ids = "remote_block_ids"
    return lambda params: {**params, ids: changed(list(params[ids][0]) if params[ids] else [])}


#: {fault of a router or client: function that puts the fault into a decode request's parameters}
OF_NIXL: dict[str, Callable[[Params], Params]] = {
    "no_blocks": _with(remote_block_ids=[]),
    "no_host": _without("remote_host"),
    "no_request": _without("remote_request_id"),
    "no_tp_size": _without("tp_size"),
    "fewer_blocks": _blocks(lambda blocks: [blocks[:-1]]),
    "odd_blocks": _blocks(lambda blocks: [["x"] * len(blocks)]),
    "more_blocks": _blocks(lambda blocks: [[*blocks, 1]]),
    "flat_blocks": _blocks(lambda blocks: blocks),
    "far_blocks": _blocks(lambda blocks: [[1 << 20] * len(blocks)]),
    "other_engine": _with(remote_engine_id="other"),
    "other_port": _with(remote_port=1),
    "decode_too": _with(do_remote_decode=True, do_remote_prefill=False),
    "more_ranks": _with(pp_size=2),
    "odd_engine": _with(remote_engine_id=["other"]),
    "alone": _with(do_remote_prefill=False),
    "nothing": lambda params: {},
}
OF_MOONCAKE: dict[str, Callable[[Params], Params]] = {
    **{name: OF_NIXL[name] for name in ("other_engine", "odd_engine", "decode_too", "alone", "nothing")},
    "no_transfer": _without("transfer_id"),
    "other_transfer": _with(transfer_id="other"),
    "odd_transfer": _with(transfer_id=["other"]),
    "no_address": _without("remote_bootstrap_addr"),
    "other_address": _with(remote_bootstrap_addr="http://nobody:1"),
    "odd_address": _with(remote_bootstrap_addr=1),
}
#: All faults. The fuzzer does not draw "other_tp_size".
MALFORMED: dict[str, Callable[[Params], Params]] = {
    **OF_NIXL,
    **OF_MOONCAKE,
    "other_tp_size": lambda params: {**params, "tp_size": 2 * params["tp_size"]},
}
