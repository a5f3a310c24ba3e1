"""Leases in the worker of a NixlConnector or MooncakeConnector: which were renewed, and which have expired.

The report of the worker only names the ended leases (nixl/base_worker.py 0.32.0:2853, mooncake_connector.py
0.32.0:2219), so kvfix wraps methods of the worker. NIXL has these methods since vLLM 0.26. In earlier releases kvfix
does not know how a lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from kvfix import applying
from kvfix.wrapping import after, around

#: Attribute of a worker: its Leases.
_HELD = "_kvfix_leases"
#: Maximum characters of an id from a request's body.
LONGEST = 256


class Leases:
    """The leases of one worker, until they are reported. extension: seconds that a renewal adds."""

    def __init__(self, extension: float | None) -> None:
        self.extension = extension
        self.expired: set[str] = set()
        self._renewed: dict[str, int] = {}
        self._first: list[str] = []

    def renew(self, names: list[str]) -> None:
        for name in names:
            before = self._renewed.get(name, 0)
            self._renewed[name] = before + 1
            if not before:
                self._first.append(name)

    def first_renewed(self) -> list[str]:
        """Return the leases that were renewed for the first time since the last call."""
        found, self._first = self._first, []
        return found

    def ended(self, name: str) -> tuple[bool, int]:
        """Return `expired` and `renewed` of LeaseEnded, and forget the lease."""
        expired = name in self.expired
        self.expired.discard(name)
        return expired, self._renewed.pop(name, 0)


def watch(connector: Any, key: str) -> Leases | None:
    """Wrap the worker of this connector, under this key of `applying.attach`. None: the worker lacks the methods."""
    worker = getattr(connector, "connector_worker", None)
    wrappers = next((each for known, each in _WRAPPERS.items() if hasattr(type(worker), known)), {})
    if not wrappers or not all(hasattr(type(worker), name) for name in wrappers):
        return None
    for name, decorate in wrappers.items():
        owner = next(each for each in type(worker).__mro__ if name in vars(each))
        applying.attach(owner, name, key, decorate)
    found = Leases(getattr(worker, "_lease_extension", None))
    setattr(worker, _HELD, found)
    return found


def named(params: Any, engine: str, request: str) -> tuple[str, str] | None:
    """Return both names from `kv_transfer_params`, or None if a client has sent something else."""
    found = (params.get(engine), params.get(request)) if isinstance(params, dict) else ("", "")
    if not all(isinstance(each, str) and 0 < len(each) <= LONGEST for each in found):
        return None
    return str(found[0]), str(found[1])


def _is_watched(worker: Any, *_: Any, **__: Any) -> bool:
    return _HELD in vars(worker)


def _reap_expired_send_leases(worker: Any, done_sending: set[str], *_: Any, **__: Any) -> Generator[None, Any, Any]:
    before = set(done_sending)
    answer = yield
    vars(worker)[_HELD].expired |= set(done_sending) - before
    return answer


def _handle_heartbeat(worker: Any, answer: Any, payload: str, *_: Any, **__: Any) -> Any:
    vars(worker)[_HELD].renew([name for name in payload.split(",") if name in worker._reqs_to_send])
    return answer


def _get_finished(worker: Any, *_: Any, **__: Any) -> Generator[None, Any, Any]:
    """MooncakeConnector expires leases in this call: compare the unsent requests before and after it."""
    before = list(worker.reqs_need_send.values())
    answer = yield
    if answer[0]:
        unsent = {each.p_req_id for each in before if not each.need_send or each.sent < each.need_send}
        vars(worker)[_HELD].expired |= unsent & answer[0]
    return answer


_around_expiry = around(_reap_expired_send_leases, _is_watched)
_around_renewal = after(_handle_heartbeat, _is_watched)
_around_report = around(_get_finished, _is_watched)

#: {method by which kvfix recognizes the worker of NIXL or Mooncake: wrappers of its methods}
_WRAPPERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "_reap_expired_send_leases": {"_reap_expired_send_leases": _around_expiry, "_handle_heartbeat": _around_renewal},
    "fetch_finished_sending_reqs": {"get_finished": _around_report},
}
