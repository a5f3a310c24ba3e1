"""What all that is between two engines has, whichever connector they have (nixl_network.py, mooncake_network.py)."""

from __future__ import annotations

from collections import Counter


class PairNetwork:
    """What is on its way. delay: steps that a transfer takes."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.now = 0
        self.counts: Counter[str] = Counter()
        #: Addresses where the thread that answers handshakes has died.
        self.dead_listeners: list[str] = []
        #: How many of the next fail. setup: of a transfer.
        self.failing = {"transfer": 0, "handshake": 0, "setup": 0, "notice": 0}
        #: Steps that a handshake, or a message, takes.
        self.handshake_steps = 1
        #: Steps that the threads that write to a peer take from being woken to their work, where there are such.
        self.writers_take = 0

    def fails(self, what: str) -> bool:
        """Whether this one fails."""
        if not self.failing[what]:
            return False
        self.failing[what] -= 1
        return True
