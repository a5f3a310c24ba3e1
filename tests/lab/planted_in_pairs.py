"""Faults planted in two engines with NixlConnector that have not as many ranks, or several KV groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple


class Planted(NamedTuple):
    """options: of the pair. text: of a finding of rule LAB001."""

    plant: Callable[[Any], None]
    connector: str
    options: dict[str, Any]
    text: str


FAULTS: dict[str, Planted] = {}
#: The second rank takes longer.
MORE: dict[str, Any] = {"ranks": 1, "peer_ranks": 2, "kv_heads": 2, "rank_delay": 3}
FEWER: dict[str, Any] = {"ranks": 2, "peer_ranks": 1, "kv_heads": 2, "rank_delay": 3}
COPIED: dict[str, Any] = {"ranks": 1, "peer_ranks": 4, "kv_heads": 2}
GROUPS: dict[str, Any] = {"windows": (32,), "num_blocks": 80}


def fault(connector: str, options: dict[str, Any], text: str) -> Callable[[Any], Any]:
    def register(plant: Any) -> Any:
        FAULTS[plant.__name__] = Planted(plant, connector, options, text)
        return plant

    return register


def _adapters(engine: Any) -> list[Any]:
    return [worker.adapter for worker in engine.connector.workers]


def _reads_at(pair: Any, factor: int) -> None:
    """Decode's second rank reads from this place of prefill's blocks, in shares of its own."""
    adapter = _adapters(pair.decode)[1]
    build = adapter._build_fa_remote
    adapter._build_fa_remote = lambda plan, *more: build(dataclasses.replace(plan, rank_offset_factor=factor), *more)


@fault("nixl-pull", MORE, "other KV of rank 1")
def a_rank_reads_the_heads_of_another(pair: Any) -> None:
    _reads_at(pair, 0)


@fault("nixl-pull", MORE, "other KV of rank 1")
def blocks_are_free_after_the_first_of_two_notices(pair: Any) -> None:
    for adapter in _adapters(pair.decode):
        add = adapter.add_remote_agent

        def adds(metadata: Any, *more: Any, adapter: Any = adapter, add: Any = add) -> Any:
            answer = add(metadata, *more)
            mappings = adapter.tp_mappings
            mappings[metadata.engine_id] = dataclasses.replace(mappings[metadata.engine_id], local_consumers=1)
            return answer

        adapter.add_remote_agent = adds


@fault("nixl-pull", FEWER, "other KV")
def heads_of_two_ranks_are_mixed_up(pair: Any) -> None:
    (adapter,) = _adapters(pair.decode)
    build = adapter._build_local_splits_from_plan
    adapter._build_local_splits_from_plan = lambda *arguments: reversed(list(build(*arguments)))


@fault("nixl-pull", COPIED, "other KV of rank 1")
def a_copied_head_is_read_from_the_place_of_another(pair: Any) -> None:
    _reads_at(pair, 1)


@fault("nixl-push", FEWER, "other KV")
def the_second_writer_is_not_waited_for(pair: Any) -> None:
    for adapter in _adapters(pair.prefill):
        make = adapter.nixl_wrapper.make_prepped_xfer
        adapter.nixl_wrapper.make_prepped_xfer = lambda *places, notif_msg, make=make: make(
            *places, notif_msg=notif_msg.rpartition(b":")[0] + b":1"
        )


@fault("nixl-pull", GROUPS, "other KV in KV group 1")
def blocks_of_a_window_are_read_in_another_order(pair: Any) -> None:
    (adapter,) = _adapters(pair.decode)
    read = adapter._read_blocks

    def reads(read_spec: Any, **more: Any) -> Any:
        whole, window = read_spec.remote_block_ids
        return read(dataclasses.replace(read_spec, remote_block_ids=[whole, window[::-1]]), **more)

    adapter._read_blocks = reads


@fault("nixl-push", GROUPS, "other KV in KV group 1")
def a_window_is_not_written(pair: Any) -> None:
    (adapter,) = _adapters(pair.prefill)
    write = adapter._xfer_blocks

    def writes(read_spec: Any, **more: Any) -> Any:
        ours, theirs = ([each[0], []] for each in (read_spec.local_block_ids, read_spec.remote_block_ids))
        return write(dataclasses.replace(read_spec, local_block_ids=ours, remote_block_ids=theirs), **more)

    adapter._xfer_blocks = writes
