"""vLLM's MooncakeConnector in one engine, in the scheduler and worker roles. pair.py makes two engines.

Decode sends its block ids to prefill, and prefill writes KV into decode's blocks. The lab replaces Mooncake's transfer
engine, the sockets, HTTP and threads (mooncake_network.py), the attention backend, and the clock.
"""

from math import inf
from typing import Any

from kvfix import clock
from kvfix.ledger import events as ev
from kvfix_tools.lab.connectors import mooncake_network
from kvfix_tools.lab.connectors.mooncake_network import Network
from kvfix_tools.lab.engine import byte_memory, kv_layout, rules
from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.engine.request_events import STUCK, RequestEvents
from kvfix_tools.lab.fuzz.parameters import Params
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_engine import PairSide, PairWorker

#: vLLM's default for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, in seconds. No prefill in the lab takes so long.
_LONG = 480


def _transfer_of(request: Any) -> str:
    return str((request.kv_transfer_params or {}).get("transfer_id"))


class MooncakeWorker(PairWorker):
    def __init__(self, side: "MooncakeSide", slots: Slots, called: Any, options: Options) -> None:
        super().__init__(side, 0, slots, called, called.connector_worker)
        #: Requests with a failed load that is not reported yet.
        self.lost: set[str] = set()
        build, fail = self.adapter._build_transfer_params, self.adapter._handle_failed_recv

        async def built(ready: Any, meta: Any, *regions: Any) -> Any:
            answer = await build(ready, meta, *regions)
            failed = set(answer[3])
            self.side.network.requests = [
                (sent.p_req_id, name) for name, sent in ready if any(meta.req_blocks[name][1]) and name not in failed
            ]
            return answer

        def failed(metas: Any, names: Any, reason: str) -> None:
            self.lost.update(name for name in names if name in metas)
            fail(metas, names, reason)

        self.adapter._build_transfer_params, self.adapter._handle_failed_recv = built, failed
        called.register_kv_caches({kv_layout.LAYER.format(0): byte_memory.tensor(slots, options).squeeze(1)})

    def get_finished(self, ended: set[str]) -> Any:
        # vLLM removes a sent request from `reqs_need_send` before this call, and an expired request only in this call.
        kept = {each.p_req_id for each in self.adapter.reqs_need_send.values()}
        sent, received = super().get_finished(ended)
        for name in sorted(sent):  # the order of a set differs between runs
            self.side.network.add(ev.LeaseEnded(name, name in kept))
        for name in sorted(received):
            start, end = self.due.pop(name, (0, 0))
            failed = name in self.lost
            self.lost.discard(name)
            if failed and self.events.model.requests[name].is_finished():
                continue
            end = start if failed else end
            self.events.loaded(name, end, end - start)
        return sent, received


class MooncakeSide(PairSide):
    worker_class = MooncakeWorker

    @classmethod
    def make_network(cls, options: Options) -> Network:
        return Network(options.delay, options.extra.get("kv_lease_duration", _LONG))

    def join(self) -> None:
        self._host = mooncake_network.Host(self.network, self.name)
        self._host.side = self
        mooncake_network.replace(self._host)
        #: Requests whose KV was kept for decode. `look` skips these requests, because decode may ask late for the KV.
        self._were_kept: set[str] = set()
        #: {transfer that the peer waits for: the transfer's entry in `reqs_need_send`}
        self._awaited: dict[str, Any] = {}
        #: {transfer: consecutive steps in which the peer waited although no request of this engine will send the KV}
        self._vain: dict[str, int] = {}
        #: {transfer: time when the lab first saw that the transfer's request had ended}
        self._ended: dict[str, float] = {}

    def raised(self, error: BaseException) -> None:
        """Report an exception that has ended a coroutine. No other code sees the exception or awaits the coroutine."""
        where = f"a coroutine of the {self._host.name} engine raises {type(error).__name__}: {error}".rstrip(": ")
        self.events.violated(rules.COROUTINE_RAISED, "", where)

    def for_prefill(self, name: str) -> Params:
        self.network.transfers[name] = self.network.transfers.get(name, 0) + 1
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self._transfer(name)}

    def for_decode(self, name: str, answer: Params | None) -> Params:
        """Return the parameters for decode. The router makes the parameters, because prefill returns none."""
        return {
            "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": f"http://{self._host.name}:{mooncake_network.PORT}",
            "transfer_id": self._transfer(name),
        }  # fmt: skip

    def _transfer(self, name: str) -> str:
        return f"xfer-{name}-{self.network.transfers[name]}"

    def keeps(self, request: str) -> bool:
        blocks = self.scheduler_side._reqs_need_send.get(request, (None, []))[1]
        if not blocks:
            return False
        self._were_kept.add(request)
        self.events.counts["stored_tokens"] += len(blocks[0]) * self.scheduler_side.block_size
        return True

    def listen(self, events: RequestEvents) -> None:
        super().listen(events)
        if self.network.timeout < _LONG:
            events.may_fail.add("")  # a prefill can take longer than the timeout

    def close(self) -> None:
        self._host.end()

    def look(self) -> None:
        """Report transfers that the peer waits for although no request of this engine will send them."""
        for request in self.events.model.requests.values():
            if request.is_finished():
                self._ended.setdefault(_transfer_of(request), clock.now())
        # Skip the check if the worker does not know all requests yet, or if requests may time out before decode asks.
        unknown = self.scheduler_side._reqs_not_processed or self.scheduler_side._reqs_need_send
        if unknown or self.network.timeout < _LONG:
            return
        requests = self.events.model.requests
        had = {_transfer_of(request): name for name, request in requests.items()}
        open_now = {_transfer_of(request) for request in requests.values() if not request.is_finished()}
        # If a prefill is aborted, decode gets no message and waits. Prefill forgets the request after the timeout.
        known = {each: sent for each, sent in self._sends.items() if clock.now() < self._ended.get(each, inf) + _LONG}
        self._awaited.update(known)
        self._awaited = {transfer: sent for transfer, sent in self._awaited.items() if sent.ready._waiters}
        for transfer, sent in self._awaited.items():
            unsent = had.get(transfer, "") not in {"", *self._were_kept} and transfer not in open_now
            self._vain[transfer] = self._vain.get(transfer, 0) + 1 if unsent and not sent.ready.is_set() else 0
            if self._vain[transfer] == STUCK:
                message = "a decode request waits for KV that prefill will not send: the prefill request has ended"
                self.events.violated(rules.AWAITED_IN_VAIN, had[transfer], message)

    @property
    def _sends(self) -> Any:
        return self.between[0].adapter.reqs_need_send

    @property
    def leases(self) -> set[str]:
        return {each.p_req_id for each in self._sends.values() if each.local_block_ids}

    def kept_of_peer(self) -> set[str]:
        """Return transfers that the peer has asked for, but that belong to no request of this engine."""
        return {each.transfer_id for each in self._sends.values() if not each.p_req_id}

    def busy(self) -> bool:
        return self.network.busy or bool(self.leases) or bool(self.between[0].due)

    def loading(self) -> set[str]:
        return set(self.between[0].due)

    def kept(self) -> dict[str, set[str]]:
        sends = {each.p_req_id for each in self._sends.values()}
        return {**super().kept(), "reqs_need_send": sends, "due": set(self.between[0].due)}
