"""Plant faults in a pair of engines of the lab: prefill and decode."""

import dataclasses
from typing import Any

from tests.lab.planted import fault, noted, row, wrap
from tests.lab.planted_faults import load_other_kv

PULL, PUSH, MOONCAKE = ("nixl-pull",), ("nixl-push",), ("mooncake",)
PULL_RANKS, PUSH_RANKS = ("nixl-pull-ranks",), ("nixl-push-ranks",)
MULTI = ("nixl-multi", "nixl-push-multi", "mooncake-multi")
#: prefill has `ranks` ranks, and decode has `peer_ranks`. Transfers of a second rank take `rank_delay` steps longer.
MORE: dict[str, Any] = {"ranks": 1, "peer_ranks": 2, "kv_heads": 2, "rank_delay": 3}
FEWER: dict[str, Any] = {"ranks": 2, "peer_ranks": 1, "kv_heads": 2, "rank_delay": 3}
COPIED: dict[str, Any] = {"ranks": 1, "peer_ranks": 4, "kv_heads": 2}
GROUPS: dict[str, Any] = {"windows": (32,), "num_blocks": 80}
GROUP = "other KV in KV group 1"
#: Paths from an engine with one connector to the adapter of the first rank, and to the adapters of all ranks.
ADAPTER, ADAPTERS = "connector.workers.0.adapter", "connector.workers.*.adapter"


def _worker(engine: Any) -> Any:
    return getattr(engine.connector, "child", engine.connector.workers[0])


def read_the_next_block(agent: Any, here_later: int = 0, there_later: int = 1) -> None:
    """In each transfer of this agent, shift its own block ids by `here_later` and the peer's ids by `there_later`."""

    def make(original: Any, kind: str, mine: Any, here: Any, theirs: Any, there: Any, **more: Any) -> Any:
        later = [[each + by for each in blocks] for blocks, by in ((here, here_later), (there, there_later))]
        return original(kind, mine, later[0], theirs, later[1], **more)

    wrap(agent, "make_prepped_xfer", make)


def _next_block(engine: str, *later: int) -> Any:
    return lambda pair: read_the_next_block(_worker(getattr(pair, engine)).adapter.nixl_wrapper, *later)


for name, plant, on in (
    ("nixl_reads_the_next_block", _next_block("decode"), (*PULL, "nixl-multi", "nixl-offload")),
    ("nixl_writes_into_the_next_block", _next_block("prefill"), (*PUSH, "nixl-push-multi")),
    ("writes_come_from_the_next_block", _next_block("prefill", 1, 0), PUSH),
    ("lmcache_of_decode_loads_other_kv", lambda pair: load_other_kv(pair.decode.connector), MULTI),
):
    row(name, "", plant, "LAB001", on=on)


@fault("LAB001", on=(*MOONCAKE, "mooncake-multi"), at="network.write")
def mooncake_writes_into_the_next_block(
    pair: Any, write: Any, of: Any, send: Any, to: str, sources: Any, targets: list[int], sizes: Any
) -> Any:
    from kvfix_tools.lab.engine.byte_memory import SLOT

    return write(of, send, to, sources, [target + pair.options.block_size * SLOT for target in targets], sizes)


@fault("LAB001", on=("nixl-offload",))
def other_kv_comes_from_the_cpu(pair: Any) -> None:
    rank = pair.decode.connector.offloading.ranks[0]
    wrap(rank, "_swap", lambda swap, source, *more, **named: swap(source.flip(0), *more, **named))
    rank.connector.worker._load_handler._swap_blocks_batch = rank._swap


# with NIXL push, decode learns of a failed write only when decode's registration ends, after 480 s
for rule, on in (("LAB003", ("nixl-push-multi",)), ("LAB002", ("nixl-multi", "mooncake-multi"))):
    row("a_transfer_fails", "", lambda pair: pair.network.failing.update(transfer=1), rule, on=on)
row("registrations_are_lost", f"decode.{ADAPTER}._do_send_reg_notif", lambda *_: None, "LAB003", on=PUSH)
row("blocks_stay_when_they_are_sent", "prefill.scheduler._free_blocks", lambda *_: None, "LAB020", on=PULL + MOONCAKE)
row(
    "the_thread_for_handshakes_dies", "",
    lambda pair: pair.network.listeners.update({"prefill:5600": lambda: {}["handshake"]}), "LAB021", on=PULL,
)  # fmt: skip
row(
    "a_registration_is_kept", "",
    lambda pair: _worker(pair.prefill).adapter._pending_d_registrations.update({"r-00000009": {}}), "LAB022", on=PUSH,
)  # fmt: skip


@fault("LAB025", on=MOONCAKE)
def a_coroutine_raises(pair: Any) -> None:
    async def record_send_reqs(metadata: Any) -> None:
        raise KeyError

    _worker(pair.prefill).adapter.record_send_reqs = record_send_reqs


row(
    "prefills_are_taken_for_aborted", "prefill.connector.scheduler_side.request_finished", lambda *_: (False, None),
    "LAB026", on=MOONCAKE,
)  # fmt: skip


@fault("KVR015", on=PULL, at="prefill.connector.workers.0.called.get_transfer_results")
def what_is_sent_is_reported_again(pair: Any, results: Any, ended: set[str]) -> Any:
    answer, again = results(ended), list(noted(pair))
    noted(pair).update(dict.fromkeys(answer.finished_sending))
    answer.finished_sending.update(again)
    return answer


@fault("KVR017", on=PULL)
def leases_are_over_at_once(pair: Any) -> None:
    """Let each lease expire as soon as prefill's worker begins a step."""
    worker = _worker(pair.prefill).adapter

    def start_load_kv(start: Any, metadata: Any) -> None:
        start(metadata)
        worker._reqs_to_send.update(dict.fromkeys(worker._reqs_to_send, 0.0))

    wrap(worker, "start_load_kv", start_load_kv)


@fault("KVR018", on=PULL, at="_admit")
def a_request_is_sent_twice(pair: Any, admit: Any, engine: Any, name: str, tokens: Any, most: int, params: Any) -> None:
    admit(engine, name, tokens, most, dict(params))
    if engine is pair.decode:
        admit(engine, f"{name}-again", tokens, most, dict(params))


@fault("KVR020", on=PUSH)
def what_is_over_is_still_written(pair: Any) -> None:
    leases_are_over_at_once(pair)
    _worker(pair.prefill).adapter._evict_finished_inbox.put = lambda _: None


@fault("KVR021", on=PUSH, at=f"prefill.{ADAPTER}._reap_expired_send_leases")
def leases_are_over_once_it_is_written(pair: Any, reap: Any, sent: set[str]) -> None:
    worker = _worker(pair.prefill).adapter
    worker._reqs_to_send.update(dict.fromkeys(worker._sending_transfers, 0.0))
    reap(sent)


@fault("KVR021", on=MOONCAKE, at=f"prefill.{ADAPTER}._build_transfer_params")
async def what_is_sent_is_free_at_once(pair: Any, build: Any, ready: Any, *more: Any) -> Any:
    answer = await build(ready, *more)
    _worker(pair.prefill).adapter.finished_sending_reqs.update(sent.p_req_id for _, sent in ready)
    return answer


@fault("KVR022", on=PUSH, at=f"decode.{ADAPTER}._do_send_reg_notif")
def decode_forgets_what_it_waits_for(pair: Any, send: Any, request: str, registration: Any) -> None:
    send(request, registration)
    _worker(pair.decode).adapter._recving_metadata.pop(request, None)


def _reads_at(factor: int) -> Any:
    """Return a fault that shifts a decode rank's reads of prefill's blocks by `factor` * the rank's block size."""
    return lambda _, build, plan, *more: build(dataclasses.replace(plan, rank_offset_factor=factor), *more)


for name, factor, options in (
    ("a_rank_reads_the_heads_of_another", 0, MORE),
    ("a_copied_head_is_read_from_the_place_of_another", 1, COPIED),
):
    at = "decode.connector.workers.1.adapter._build_fa_remote"
    row(name, at, _reads_at(factor), "LAB001 other KV of rank 1", on=PULL_RANKS, every=options)


@fault("LAB001 other KV of rank 1", on=PULL_RANKS, every=MORE, at=f"decode.{ADAPTERS}.add_remote_agent")
def blocks_are_free_after_the_first_of_two_notices(_: Any, add: Any, metadata: Any, *more: Any) -> Any:
    answer, mappings = add(metadata, *more), add.__self__.tp_mappings
    mappings[metadata.engine_id] = dataclasses.replace(mappings[metadata.engine_id], local_consumers=1)
    return answer


row(
    "heads_of_two_ranks_are_mixed_up", f"decode.{ADAPTER}._build_local_splits_from_plan",
    lambda _, build, *arguments: reversed(list(build(*arguments))), "LAB001 other KV", on=PULL_RANKS, every=FEWER,
)  # fmt: skip
row(
    "the_second_writer_is_not_waited_for", f"prefill.{ADAPTERS}.nixl_wrapper.make_prepped_xfer",
    lambda _, make, *places, notif_msg: make(*places, notif_msg=notif_msg.rpartition(b":")[0] + b":1"),
    "LAB001 other KV", on=PUSH_RANKS, every=FEWER,
)  # fmt: skip


@fault(f"LAB001 {GROUP}", on=PULL_RANKS, every=GROUPS, at=f"decode.{ADAPTER}._read_blocks")
def blocks_of_a_window_are_read_in_another_order(_: Any, read: Any, read_spec: Any, **more: Any) -> Any:
    whole, window = read_spec.remote_block_ids
    return read(dataclasses.replace(read_spec, remote_block_ids=[whole, window[::-1]]), **more)


@fault(f"LAB001 {GROUP}", on=PUSH_RANKS, every=GROUPS, at=f"prefill.{ADAPTER}._xfer_blocks")
def a_window_is_not_written(_: Any, write: Any, read_spec: Any, **more: Any) -> Any:
    ours, theirs = ([each[0], []] for each in (read_spec.local_block_ids, read_spec.remote_block_ids))
    return write(dataclasses.replace(read_spec, local_block_ids=ours, remote_block_ids=theirs), **more)
