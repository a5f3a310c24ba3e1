"""The base class of readers, which read a connector's own state and metadata.

A reader changes nothing. kvfix calls it before and after hooks. If a reader raises there, kvfix still records the
connector, but checks no more rules. `kvfix look` and the watchdog may call `add_state` at any time, even in a step.
"""

from collections.abc import Collection, Iterable
from typing import Any

#: The tokens [start, end) of a transfer: (request, start, end)
Span = tuple[str, int, int]
Spans = list[Span] | None
#: The name that `Reader.kept` yields for the chunks that lookups have pinned for loads.
PINS = "pins of the worker"


class Reader:
    """The reader for an unknown connector. vLLM's hooks show lookups and allocations, but neither loads nor stores."""

    #: Tokens per block if the metadata list the blocks of a load; 0 if they list its tokens.
    whole_blocks = 0
    #: True if a load counts its tokens from the end of the computed tokens, which the metadata do not contain.
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
        """Add fields to the connector's row, which already has class and role. `kvfix.engine_state` lists them."""

    def sends(self, request: str) -> bool:
        """Return True if the worker will report this ended request as sent."""
        return self.reports_sent

    def hit(self, request: str) -> int | None:
        """Return the tokens that the last lookup of this request found in the external cache; None: not known."""
        return None

    def found(self, request: str) -> int:
        """Return the tokens that the last lookup found, even if 0 were promised. Stores leave these tokens out."""
        return 0

    def lookup_timeout(self) -> float:
        """Return the maximum seconds that the hook waits for a lookup; 0: the hook never waits."""
        return 0.0

    def loads(self, metadata: Any) -> Spans:
        """Return the loads in the metadata; None: not known."""
        return None

    def stores(self, metadata: Any) -> Spans:
        """Return the stores in the metadata; None: not known."""
        return None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the connector that change token counts, such as `chunk_size`."""
        return {}

    def not_stored(self, metadata: Any) -> Collection[str]:
        """Return the requests in these metadata whose store was cancelled in the worker (KVF007)."""
        return ()

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """Yield (name, container of request ids) for all state that the connector must drop when a request ends."""
        return ()

    @staticmethod
    def containers(holder: Any, names: Iterable[str], prefix: str = "") -> Iterable[tuple[str, Collection[str]]]:
        """Return (prefix + name, container) for those attributes `names` that `holder` has."""
        return [(prefix + name, getattr(holder, name)) for name in names if hasattr(holder, name)]

    def pinned(self, request: str) -> Any:
        """Return the pins of this request, or None. Compare with `is`, because a reused id has a new pins object."""
        return None

    def looks_up(self, request: str) -> bool:
        """Return True if the lookup client has state of this request."""
        return False

    def peer(self, request: Any) -> tuple[str, str] | None:
        """Return the ids of the engine and of its request whose blocks this request reads; None: it reads none."""
        return None

    def lease(self, answer: Any) -> float | None:
        """Return the seconds for which the blocks of a request are kept. answer: what `request_finished` returned."""
        return None

    def lease_name(self, request: Any) -> str:
        """Return the id that the peer uses for this request; "" if it is the same id."""
        return ""

    def waits(self, request: str) -> bool:
        """Return True if the connector keeps this ended request on purpose, until a timeout."""
        return False

    def left(self, request: str) -> list[str]:
        """Return the names of the containers in which this ended request has leaked."""
        return [where for where, names in self.kept() if request in names]
