"""What a reader of a connector's own state and metadata answers, and what it answers for any connector.

It only reads. The recorder asks it around the hooks: if it raises there, its connector is still recorded, but no rule
is checked any more. A look asks for `add_state`, between any two bytecodes of the main thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Optional

#: (request, first token, end)
Span = tuple[str, int, int]
Spans = Optional["list[Span]"]
#: Name of the place of the chunks that a lookup has pinned for its load.
PINS = "pins of the worker"


class Reader:
    """Any connector: vLLM's hooks show promises and grants, but neither loads nor stores."""

    #: Tokens of a block, if the metadata name the blocks of a load and not its tokens.
    whole_blocks = 0
    #: Whether the tokens of a load count from the end of the computed ones, as the metadata do not say where that is.
    relative = False
    #: Whether the worker reports every ended request as sent once its transfers are done.
    reports_sent = False
    #: Whether it keeps blocks of ended requests for a peer, which reads them.
    keeps_for_peer = False
    #: Whether that peer hears nothing of a request that ends before it has its blocks, as `pushed` of ReadsFrom.
    pushed = False
    #: Whether a store leaves out what the cache has already, whoever stored it: then a hole is no hole.
    leaves_out_stored = False

    def __init__(self, connector: Any) -> None:
        self.connector = connector

    def add_state(self, state: dict[str, Any]) -> None:
        """Add to `state`, which has the connector's class and role, what connectors.py describes."""

    def sends(self, request: str) -> bool:
        """Whether the worker will report this ended request as sent."""
        return self.reports_sent

    def hit(self, request: str) -> int | None:
        """Tokens that the last lookup of this request found in the external cache."""
        return None

    def found(self, request: str) -> int:
        """Tokens that the connector takes for stored since a lookup, also where it has promised none since (a server
        that is taken for dead)."""
        return 0

    def lookup_timeout(self) -> float:
        """Maximum seconds that the hook waits for a lookup; 0: it never waits."""
        return 0.0

    def loads(self, metadata: Any) -> Spans:
        """Loads in the metadata, for the worker."""
        return None

    def stores(self, metadata: Any) -> Spans:
        """Stores in the metadata, for the worker."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings of the connector that change the accounting, above all `chunk_size`. Empty if it has none."""
        return {}

    def not_stored(self, metadata: Any) -> Collection[str]:
        """Requests in these metadata whose store was cancelled in the worker (KVF007)."""
        return ()

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        """(place, its entries by request id): all state that must be gone when the request has ended."""
        return ()

    def pinned(self, request: str) -> Any:
        """The pins of this request: another object for a later request of the same id. None: no pins."""
        return None

    def looks_up(self, request: str) -> bool:
        """Whether the lookup client has state of this request."""
        return False

    def peer(self, request: Any) -> tuple[str, str] | None:
        """Engine and request whose kept blocks this request names; None: it names none."""
        return None

    def lease(self, answer: Any) -> float | None:
        """Seconds for which the blocks of a request are kept, by what `request_finished` answers. None: not known."""
        return None

    def lease_name(self, request: Any) -> str:
        """Another name by which the peer knows this request; "": it has none."""
        return ""

    def waits(self, request: str) -> bool:
        """Whether the connector keeps this request on purpose, until a time that is to come."""
        return False

    def left(self, request: str) -> list[str]:
        """Places in which this ended request has leaked."""
        return [where for where, names in self.kept() if request in names]
