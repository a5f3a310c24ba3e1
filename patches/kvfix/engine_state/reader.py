"""The base class of readers. A reader reads the state and the metadata of one connector, and changes nothing.

kvfix calls readers before and after hooks. If one of these calls raises, kvfix still records the connector's events,
but checks no more rules. `kvfix look` and the watchdog may call `add_state` at any time, even in a step.
"""

from collections.abc import Collection, Iterable
from typing import Any

#: (request id, start, end): a transfer of the request's tokens from `start` to `end` - 1.
Span = tuple[str, int, int]
Spans = list[Span] | None  # None: not known
#: `Reader.kept` yields this name for the chunks that lookups have pinned for loads.
PINS = "pins of the worker"


class Reader:
    """The reader for an unknown connector. kvfix knows only the lookups and allocations that the hooks show."""

    #: The number of tokens in a block if the connector loads only whole blocks, otherwise 0 (`LoadDue.block`).
    whole_blocks = 0
    #: True if `loads` counts tokens from the first token that vLLM has not computed (`LoadDue.relative`).
    relative = False
    #: True if the worker reports every ended request as sent, once the request's transfers have ended.
    reports_sent = False
    #: True if the connector keeps blocks of ended requests until another instance has read them.
    keeps_for_peer = False
    #: True if prefill writes into the blocks of decode (`ReadsFrom.pushed`).
    pushed = False
    #: True if stores skip chunks that are already cached. Gaps between stores are then correct.
    leaves_out_stored = False

    def __init__(self, connector: Any) -> None:
        self.connector = connector

    def add_state(self, state: dict[str, Any]) -> None:
        """Add fields to `state`, which has the connector's class and role. `kvfix.engine_state` lists the fields."""

    def sends(self, request: str) -> bool:
        """Return True if the worker will report this ended request as sent."""
        return self.reports_sent

    def hit(self, request: str) -> int | None:
        """Return how many tokens the last lookup of this request found in the external cache (None: not known)."""
        return None

    def found(self, request: str) -> int:
        """Return how many tokens the last lookup found, even if the hook promised 0. Stores leave these tokens out."""
        return 0

    def lookup_timeout(self) -> float:
        """Return how many seconds the lookup hook waits at most. 0 means that the hook never waits."""
        return 0.0

    def loads(self, metadata: Any) -> Spans:
        return None

    def stores(self, metadata: Any) -> Spans:
        return None

    def settings(self) -> dict[str, Any]:
        """Return the connector's settings that change token counts, such as `chunk_size`."""
        return {}

    def not_stored(self, metadata: Any) -> Collection[str]:
        """Return the requests of `metadata` whose store a fix, such as KVF007, has cancelled in the worker."""
        return ()

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Yield (name, container of request ids) for all state that the connector must drop when a request ends."""
        return ()

    @staticmethod
    def containers(holder: Any, names: Iterable[str], prefix: str = "") -> Iterable[tuple[str, Collection[str]]]:
        """Return (prefix + name, container) for each attribute in `names` that `holder` has."""
        return [(prefix + name, getattr(holder, name)) for name in names if hasattr(holder, name)]

    def pinned(self, request: str) -> Any:
        """Return the object with the request's pins, or None. A later request with the same id has another object."""
        return None

    def looks_up(self, request: str) -> bool:
        """Return True if the lookup client holds this request."""
        return False

    def peer(self, request: Any) -> tuple[str, str] | None:
        """Return (engine id, request id) of the remote request whose blocks this request reads, or None."""
        return None

    def lease(self, answer: Any) -> float | None:
        """Return how many seconds vLLM keeps a request's blocks (None: not known). answer: from `request_finished`."""
        return None

    def lease_name(self, request: Any) -> str:
        """Return the id that the peer uses for this request, or "" if the peer uses the same id."""
        return ""

    def waits(self, request: str) -> bool:
        """Return True if the connector keeps this ended request on purpose until a timeout."""
        return False

    def left(self, request: str) -> list[str]:
        """Return the names of the containers that leak this ended request."""
        return [where for where, names in self.kept() if request in names]
