"""NixlConnector in push mode: prefill writes into the blocks of decode (nixl.py has the common part).

Decode sends its block ids to prefill in a notice (a registration). The lab replaces the writer thread
(nixl_network.py).
"""

from typing import Any

from kvfix_tools.lab.connectors.nixl import PORT, NixlSide, NixlWorker
from kvfix_tools.lab.fuzz.parameters import Params
from kvfix_tools.ledger import WriteBegun, WriteEnded, Written


class PushWorker(NixlWorker):
    """A worker that records its writes, and the writes into its blocks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._note_writes()

    def _note_writes(self) -> None:
        write, done = self.adapter._xfer_blocks_for_req, self.adapter._pop_done_transfers

        def writes(req_id: str, meta: Any) -> None:
            write(req_id=req_id, meta=meta)
            if req_id in self.adapter._sending_transfers:
                self.together.writing.setdefault(req_id, set()).add(self.rank)
                self.side.add_to_pair(WriteBegun(req_id, meta.remote.request_id))

        def pops(transfers: Any) -> Any:
            ended, failed = done(transfers)
            if transfers is self.adapter._sending_transfers:
                for name in ended:
                    ranks = self.together.writing.get(name, set())
                    ranks.discard(self.rank)
                    if not ranks:
                        self.together.writing.pop(name, None)
                        self.side.add_to_pair(WriteEnded(name))
            return ended, failed

        self.adapter._xfer_blocks_for_req = writes
        self.adapter._pop_done_transfers = pops

    def begun(self) -> None:
        self.side.network.write()

    def get_finished(self, ended: set[str]) -> Any:
        waiting = self.adapter._recving_metadata
        for notice in list(self.adapter._pending_completion_notifs.queue):
            name = notice.decode().rpartition(":")[0]
            if name and not notice.startswith(b"HB:"):
                self.side.add_to_pair(Written(name, name in waiting))
        return super().get_finished(ended)

    def has_loaded(self, name: str, of: str) -> None: ...


class PushSide(NixlSide):
    """Both roles of one engine."""

    worker_class = PushWorker

    def busy(self) -> bool:
        return super().busy() or bool(self.loading())  # the peer may still push

    def kept_of_peer(self) -> set[str]:
        return set().union(*(worker.adapter._pending_d_registrations for worker in self.between))

    def for_decode(self, name: str, answer: Params | None) -> Params | None:
        if answer is not None:
            return answer
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [],
            "remote_engine_id": self.engine_id, "remote_request_id": name, "remote_host": self.name,
            "remote_port": PORT, "tp_size": len(self.workers),
        }  # fmt: skip
