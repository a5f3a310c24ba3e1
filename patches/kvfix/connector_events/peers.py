"""Read the state of connectors between prefill and decode instances (NIXL, Mooncake), and record leases.

A lease is the time for which prefill keeps the blocks of a request for decode. Decode can renew a lease. The prefill
worker reports that a lease has ended, but not whether the lease has expired (nixl/base_worker.py 0.32.0:2853,
mooncake_connector.py 0.32.0:2219). So kvfix wraps methods of the worker. NIXL before vLLM 0.26 lacks these methods.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any

from kvfix import applying
from kvfix.engine_state.reader import Reader, Span, Spans
from kvfix.wrapping import after, around

_HELD = "_kvfix_leases"
#: kvfix ignores an id in a request's body if the id has more characters than LONGEST.
LONGEST = 256


class _Peer(Reader):
    """The readers' base class. `_SCHEDULER`, `_WORKER`: attributes in which scheduler and worker keep requests."""

    keeps_for_peer = True
    _SCHEDULER: tuple[str, ...] = ()
    _WORKER: tuple[str, ...] = ()
    #: The key in `kv_transfer_params` under which the peer's request id is stored.
    _PEER_REQUEST = ""

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.whole_blocks = int(connector._vllm_config.cache_config.block_size)
        self._scheduler = getattr(connector, "connector_scheduler", None)
        self._worker = getattr(connector, "connector_worker", None)

    def peer(self, request: Any) -> tuple[str, str] | None:
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        engine, name = params.get("remote_engine_id"), params.get(self._PEER_REQUEST)
        is_valid = all(isinstance(each, str) and 0 < len(each) <= LONGEST for each in (engine, name))
        return (str(engine), str(name)) if is_valid else None  # a client can send values of any type

    def loads(self, metadata: Any) -> Spans:
        """Leave out a request without blocks. Decode loads nothing for the request, and only notifies prefill."""
        return [self._span(name, meta) for name, meta in self._received(metadata) if any(meta.local_block_ids)]

    def _received(self, metadata: Any) -> Any:
        return metadata.reqs_to_recv.items()

    def _span(self, name: str, meta: Any) -> Span:
        """Return the token span of the blocks in the metadata. Token 0 is the first token after the prefix hit."""
        return name, 0, len(meta.local_block_ids[0]) * self.whole_blocks

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        yield from self.containers(self._scheduler, self._SCHEDULER)
        yield from self.containers(self._worker, self._WORKER)


class Nixl(_Peer):
    """vLLM's NixlConnector in pull mode (nixl/connector.py 0.32.0). A load has whole blocks of a request's prompt."""

    _SCHEDULER: tuple[str, ...] = ("_reqs_need_recv", "_reqs_need_save", "_reqs_need_send", "_heartbeat_req_engine")
    _WORKER: tuple[str, ...] = (
        "_recving_metadata", "_recving_transfers", "_reqs_to_send", "_reqs_to_process", "_pending_recv_notifs",
    )  # fmt: skip
    _PEER_REQUEST = "remote_request_id"

    def lease(self, answer: Any) -> float | None:
        """Return the lease in seconds. Decode can also keep blocks for prefill (pull_scheduler.py 0.32.0:254)."""
        to_decode = (answer[1] or {}).get("do_remote_prefill", True)
        return getattr(self._scheduler, "_kv_lease_duration" if to_decode else "decoder_kv_blocks_ttl", None)

    def sends(self, request: str) -> bool:
        """Return True while the worker lists the request, from the request's first batch to the end of its lease."""
        return request in getattr(self._worker, "_reqs_to_process", ())

    def _span(self, name: str, meta: Any) -> Span:
        hit = getattr(meta, "local_num_computed_blocks", ())
        start = hit[0] if hit else 0
        return name, start * self.whole_blocks, (start + len(meta.local_block_ids[0])) * self.whole_blocks


class NixlPush(Nixl):
    """vLLM's NixlConnector in push mode (nixl/push_scheduler.py 0.32.0). Decode registers each load with prefill."""

    relative = True
    pushed = True
    _SCHEDULER = (
        *Nixl._SCHEDULER, "_push_pending_registrations", "_push_registration_deadlines", "_finished_request_blocks",
        "_newly_finished_push_blocks",
    )  # fmt: skip
    _WORKER = (*Nixl._WORKER, "_sending_transfers", "_send_failures", "_push_finished_blocks")
    _span = _Peer._span

    def waits(self, request: str) -> bool:
        """Return True until KVF322 sees that the load has ended, or fails the load. Without KVF322, return False."""
        return request in getattr(self._worker, "_kvfix_ends", ())


class Mooncake(_Peer):
    """vLLM's MooncakeConnector (mooncake/mooncake_connector.py 0.32.0). Prefill writes into decode's blocks."""

    relative = True
    _SCHEDULER = ("_reqs_need_recv", "_reqs_need_send")
    _PEER_REQUEST = "transfer_id"  # the router gives both instances the same id

    def _received(self, metadata: Any) -> Iterable[tuple[str, Any]]:
        return (item for of_engine in metadata.reqs_to_recv.values() for item in of_engine.items())

    def lease(self, answer: Any) -> float | None:
        found = getattr(sys.modules.get("vllm.envs"), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", None)
        return float(found) if isinstance(found, int | float) else None

    def lease_name(self, request: Any) -> str:
        params = request.kv_transfer_params
        found = params.get("transfer_id") if isinstance(params, dict) else ""
        return found if isinstance(found, str) and len(found) <= LONGEST else ""


class Leases:
    """The leases of one worker. `ended` removes a lease. extension: seconds from a renewal to the lease's end."""

    def __init__(self, extension: float | None) -> None:
        self.extension = extension
        self.expired: set[str] = set()
        self._renewed = Counter[str]()
        self._first: list[str] = []

    def renew(self, names: list[str]) -> None:
        self._first += [name for name in dict.fromkeys(names) if name not in self._renewed]
        self._renewed.update(names)

    def first_renewed(self) -> list[str]:
        """Return the leases whose first renewal came after the last call of this function."""
        found, self._first = self._first, []
        return found

    def ended(self, name: str) -> tuple[bool, int]:
        """Return the fields `expired` and `renewed` of `events.LeaseEnded`, and forget the lease."""
        expired = name in self.expired
        self.expired.discard(name)
        return expired, self._renewed.pop(name, 0)


def watch(connector: Any, key: str) -> Leases | None:
    """Wrap methods of the worker and return its leases, or None if a method is missing. key: for `applying.attach`."""
    worker = getattr(connector, "connector_worker", None)
    wrappers = next((each for known, each in _WRAPPERS.items() if hasattr(type(worker), known)), {})
    if not wrappers or not all(hasattr(type(worker), name) for name in wrappers):
        return None
    for name, decorate in wrappers.items():
        applying.attach(type(worker), name, key, decorate)
    found = Leases(getattr(worker, "_lease_extension", None))
    setattr(worker, _HELD, found)
    return found


def _is_watched(worker: Any, *_: Any, **__: Any) -> bool:
    return _HELD in vars(worker)


def _reap_expired_send_leases(worker: Any, done_sending: set[str], *_: Any, **__: Any) -> Generator[None, Any, Any]:
    before = set(done_sending)
    yield
    vars(worker)[_HELD].expired |= set(done_sending) - before


def _handle_heartbeat(worker: Any, answer: Any, payload: str, *_: Any, **__: Any) -> None:
    vars(worker)[_HELD].renew([name for name in payload.split(",") if name in worker._reqs_to_send])


def _get_finished(worker: Any, *_: Any, **__: Any) -> Generator[None, Any, Any]:
    """Record a lease as expired if MooncakeConnector reports the blocks as sent, but has not sent all blocks."""
    before = list(worker.reqs_need_send.values())
    answer = yield
    if answer[0]:
        unsent = {each.p_req_id for each in before if not each.need_send or each.sent < each.need_send}
        vars(worker)[_HELD].expired |= unsent & answer[0]


#: Wrappers for NIXL's and for Mooncake's worker. kvfix recognizes a worker by the method that is the outer key.
_WRAPPERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "_reap_expired_send_leases": {
        "_reap_expired_send_leases": around(_reap_expired_send_leases, _is_watched),
        "_handle_heartbeat": after(_handle_heartbeat, _is_watched),
    },
    "fetch_finished_sending_reqs": {"get_finished": around(_get_finished, _is_watched)},
}
