"""The base class of the networks between two engines (nixl_network.py, mooncake_network.py)."""

from collections import Counter


class PairNetwork:
    """The messages and transfers in flight. delay: steps of a transfer."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.now = 0
        self.counts: Counter[str] = Counter()
        #: Addresses whose listener thread has died.
        self.dead_listeners: list[str] = []
        #: {kind: number of next failures}. setup: of a transfer.
        self.failing = {"transfer": 0, "handshake": 0, "setup": 0, "notice": 0}
        #: Steps of a handshake or a message.
        self.handshake_steps = 1
        #: Steps from waking a writer thread to its work.
        self.writers_take = 0

    def fails(self, what: str) -> bool:
        """Return True if the next handshake or transfer fails."""
        if not self.failing[what]:
            return False
        self.failing[what] -= 1
        return True
