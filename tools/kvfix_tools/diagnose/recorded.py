"""Files of kvfix's own flight recorder (kvfix/probes/dump.py): their events, as they were told in the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.case import Case
    from kvfix_tools.diagnose.seen import Seen

#: {name: the event's type}
_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in ev.Event.__args__}  # type: ignore[attr-defined]


class Recorders:
    """What each connector of each file tells: a case of its own, with a ledger of its own, as it had in the engine."""

    def __init__(self) -> None:
        self.cases: dict[tuple[str, str, str], Case] = {}
        #: {file: process that is being told of}: a bundle of `kvfix dump` has several.
        self._process: dict[str, str] = {}

    def take(self, case: Case, seen: Seen) -> None:
        """One line. `case` is the one that the file was given to."""
        data = line(seen.body)
        if seen.fields["kind"] == "recorder":
            self._process[seen.file] = str(data.get("pid", ""))
            versions = data.get("versions")
            if isinstance(versions, dict):
                for dist in ("lmcache", "vllm"):
                    case.releases.name(dist, str(versions.get(dist)), seen.file)
            return
        own = self._case(case, seen.file, str(data.get("connector", data.get("number", ""))))
        if data.get("sees_loads") is False:
            own.blind.add("KVR006")
        happened = event(data) if seen.fields["kind"] == "event" else None
        wall = data.get("wall")
        if happened is not None:
            own.told_in_engine(happened, seen._replace(time=wall / 1e9 if isinstance(wall, int) else None))

    def _case(self, case: Case, file: str, connector: str) -> Case:
        key = (file, self._process.get(file, ""), connector)
        own = self.cases.get(key)
        if own is None:
            own = self.cases[key] = case.another()
        return own


def line(body: bytes) -> dict[str, Any]:
    """A line of the file; empty if it is damaged."""
    try:
        found = json.loads(body[max(0, body.find(b'{"kind":')) :])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def event(data: dict[str, Any]) -> Event | None:
    """The event of a line; None if it is of a kind that this release does not know, or damaged."""
    kind = _EVENTS.get(str(data.get("event")))
    if kind is None:
        return None
    known = {name: data[name] for name in kind._fields if name in data}
    if any(not _fits(value, str(kind.__annotations__[name])) for name, value in known.items()):
        return None
    try:
        return kind(**known)  # type: ignore[no-any-return]
    except TypeError:  # a field is missing
        return None


def _fits(value: Any, hint: str) -> bool:
    if value is None:
        return "None" in hint
    if "str" in hint:
        return isinstance(value, str)
    if "bool" in hint:
        return isinstance(value, bool)
    return isinstance(value, int | float if "float" in hint else int) and not isinstance(value, bool)
