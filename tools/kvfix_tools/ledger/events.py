"""Events that no process of an engine sees alone. The records of several processes, or the lab, show them."""

from typing import NamedTuple


class RankDiffers(NamedTuple):
    """Only the scheduler or only the rank has recorded the load of [start, end).

    Both have recorded a load or a store before it and after it.

    told: True if the scheduler ordered the load and the rank did not start it. False if the rank started a load that
    the scheduler did not order.
    """

    request: str
    rank: int
    start: int
    end: int
    told: bool

    def text(self) -> str:
        what = "was scheduled but not started" if self.told else "was started but not scheduled"
        return f"rank {self.rank}: the load of tokens {self.start} to {self.end} {what}"


class LeaseRead(NamedTuple):
    """Request `reader` of the peer has loaded the kept blocks of `request`, and uses their KV as correct.

    pushed: as in ReadsFrom.
    """

    request: str
    reader: str
    pushed: bool = False

    def text(self) -> str:
        return f"{self.reader} of the peer has loaded the kept blocks"


class NotReturned(NamedTuple):
    """Request `reader` of the peer does not need the kept blocks any more, but no release message has arrived.

    loaded: True if `reader` has loaded the blocks, False if it has ended without loading them. expired: True if the
    lease timed out, False if the blocks are still kept. Only the records of both engines show this.
    """

    request: str
    reader: str
    loaded: bool
    expired: bool

    def text(self) -> str:
        done = "has loaded the kept blocks" if self.loaded else "has ended"
        return f"{self.reader} of the peer {done}, but no release message has arrived"


class WriteBegun(NamedTuple):
    """The worker begins to write the kept blocks of the request into blocks of request `reader` of its peer."""

    request: str
    reader: str

    def text(self) -> str:
        return f"a write of the kept blocks to {self.reader} of the peer begins"


class WriteEnded(NamedTuple):
    """The write of the request's kept blocks has ended or failed: nothing reads the blocks any more."""

    request: str

    def text(self) -> str:
        return "the write of the kept blocks has ended"


class Written(NamedTuple):
    """The peer reports that it has written into the request's blocks. awaited: True if the request waits for this."""

    request: str
    awaited: bool

    def text(self) -> str:
        text = "the peer has written into blocks of the request"
        return text if self.awaited else f"{text}, which does not wait for the write"
