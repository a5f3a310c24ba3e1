"""Lines of kvfix's own recorder in the input, whose events the ledger checks as in the engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kvfix_tools import recording

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


class RecorderLines:
    """Recorded events. Each connector of each process has its own diagnosis and ledger, as in the engine."""

    def __init__(self) -> None:
        #: {(file, pid, number of the connector): its diagnosis}
        self.connectors: dict[tuple[str, str, str], Diagnosis] = {}
        #: {file: pid of the recorder that is being read}: a bundle of `kvfix dump` has several.
        self._pid: dict[str, str] = {}

    def take(self, log: Diagnosis, line: LogLine) -> None:
        """Take one line. log: the diagnosis of the whole input."""
        data = _decoded(line.body)
        if line.fields["kind"] == "recorder":
            self._pid[line.file] = str(data.get("pid", ""))
            versions = data.get("versions")
            if isinstance(versions, dict):
                for dist in ("lmcache", "vllm"):
                    log.releases.name(dist, str(versions.get(dist)), line.file)
            return
        key = (line.file, self._pid.get(line.file, ""), str(data.get("connector", data.get("number", ""))))
        own = self.connectors.get(key)
        if own is None:
            own = self.connectors[key] = log.of_connector(sees_loads=data.get("sees_loads") is not False)
        event = _event(data) if line.fields["kind"] == "event" else None
        if event is not None:
            wall = data.get("wall")
            own.take_event(event, replace(line, time=wall / 1e9 if isinstance(wall, int) else None))

    def counted(self) -> Counter[str]:
        """Return {kind of event or "requests": number}, without the workers' events if the scheduler has recorded
        events.
        """
        every = self.connectors.values()
        counted: Counter[str] = Counter()
        for own in [own for own in every if own.counts["Asked"]] or every:
            counted.update(own.counts, requests=own.requests.named)
        return counted


def _decoded(body: bytes) -> dict[str, Any]:
    """Return a line of the file; empty if it is damaged."""
    try:
        return recording.decoded(body[max(0, body.find(b'{"kind":')) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _event(data: dict[str, Any]) -> Event | None:
    """Return the event; None if it is damaged, or if this release does not know its kind."""
    try:
        return recording.event(data)
    except (KeyError, msgspec.ValidationError):
        return None
