"""Readers of vLLM's NixlConnector (readers.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvfix.connector_events import leases
from kvfix.engine_state.reader import Reader, Span, Spans


class Nixl(Reader):
    """vLLM's NixlConnector in pull mode (nixl/connector.py 0.32.0). It loads whole blocks of a request's prompt."""

    keeps_for_peer = True
    _SCHEDULER: tuple[str, ...] = ("_reqs_need_recv", "_reqs_need_save", "_reqs_need_send", "_heartbeat_req_engine")
    _WORKER: tuple[str, ...] = (
        "_recving_metadata",
        "_recving_transfers",
        "_reqs_to_send",
        "_reqs_to_process",
        "_pending_recv_notifs",
    )

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.whole_blocks = int(connector._vllm_config.cache_config.block_size)

    def peer(self, request: Any) -> tuple[str, str] | None:
        return leases.named(request.kv_transfer_params, "remote_engine_id", "remote_request_id")

    def lease(self, answer: Any) -> float | None:
        """A decode instance keeps blocks for the next turn. It keeps them longer than a prefill instance does
        (nixl/pull_scheduler.py 0.32.0:250)."""
        to_decode = (answer[1] or {}).get("do_remote_prefill", True)
        name = "_kv_lease_duration" if to_decode else "decoder_kv_blocks_ttl"
        return getattr(self.connector.connector_scheduler, name, None)

    def sends(self, request: str) -> bool:
        """The worker lists a request from its first batch to the end of its lease."""
        return request in getattr(getattr(self.connector, "connector_worker", None), "_reqs_to_process", ())

    def loads(self, metadata: Any) -> Spans:
        """Leave out requests without blocks: for these, decode only notifies prefill."""
        return [self._span(name, meta) for name, meta in metadata.reqs_to_recv.items() if any(meta.local_block_ids)]

    def _span(self, name: str, meta: Any) -> Span:
        hit = getattr(meta, "local_num_computed_blocks", ())
        start = hit[0] if hit else 0
        return name, start * self.whole_blocks, (start + len(meta.local_block_ids[0])) * self.whole_blocks

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        for side, names in (
            (getattr(self.connector, "connector_scheduler", None), self._SCHEDULER),
            (getattr(self.connector, "connector_worker", None), self._WORKER),
        ):
            for name in names if side is not None else ():
                if hasattr(side, name):
                    yield name, getattr(side, name)


class NixlPush(Nixl):
    """vLLM's NixlConnector in push mode (nixl/push_scheduler.py 0.32.0): a load begins with a registration of blocks.

    The metadata has only the blocks after the prefix hit.
    """

    relative = True
    pushed = True
    _SCHEDULER = (
        *Nixl._SCHEDULER, "_push_pending_registrations", "_push_registration_deadlines", "_finished_request_blocks",
        "_newly_finished_push_blocks",
    )  # fmt: skip
    _WORKER = (*Nixl._WORKER, "_sending_transfers", "_send_failures", "_push_finished_blocks")

    def waits(self, request: str) -> bool:
        """The registration stays valid until its deadline, also after an abort. After the deadline KVF322 reports the
        load as failed."""
        return request in getattr(getattr(self.connector, "connector_worker", None), "_kvfix_ends", ())

    def _span(self, name: str, meta: Any) -> Span:
        return name, 0, len(meta.local_block_ids[0]) * self.whole_blocks


def reader(connector: Any, mode: str) -> Reader:
    """Return the reader for the connector's `_TRANSFER_MODE`."""
    return {"pull": Nixl, "push": NixlPush}.get(mode, Reader)(connector)
