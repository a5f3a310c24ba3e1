"""Events that no process of an engine sees alone. The records of several processes show them, or the lab."""

from __future__ import annotations

from typing import NamedTuple


class RankDiffers(NamedTuple):
    """A load of [start, end) is in one record only, the scheduler's or the rank's, between loads that are in both.

    told: True: in the scheduler's metadata, and the rank has not started it. False: the other way round.
    """

    request: str
    rank: int
    start: int
    end: int
    told: bool

    def text(self) -> str:
        what = "was scheduled and not started" if self.told else "was started and not scheduled"
        return f"rank {self.rank}: the load of tokens {self.start} to {self.end} {what}"


class LeaseRead(NamedTuple):
    """Request `reader` of the peer has loaded the blocks that are kept of `request`, and takes them for right.

    pushed: as in ReadsFrom.
    """

    request: str
    reader: str
    pushed: bool = False

    def text(self) -> str:
        return f"{self.reader} has loaded its blocks"


class NotReturned(NamedTuple):
    """Request `reader` of the peer is done with the kept blocks, and no notice of it has come.

    loaded: it has loaded them; False: it has ended without. expired: their lease has ended by its time; False: they are
    still kept. Only the records of both engines show it (peers.py).
    """

    request: str
    reader: str
    loaded: bool
    expired: bool

    def text(self) -> str:
        done = "has loaded its blocks" if self.loaded else "has ended"
        return f"{self.reader} {done}, and no notice has come"


class WriteBegun(NamedTuple):
    """The worker begins to write the kept blocks of the request into those of request `reader` of its peer."""

    request: str
    reader: str

    def text(self) -> str:
        return f"a write of its blocks to {self.reader} begins"


class WriteEnded(NamedTuple):
    """What it writes of the request is done, or has failed: nothing reads its blocks any more."""

    request: str

    def text(self) -> str:
        return "the write of its blocks has ended"


class Written(NamedTuple):
    """The peer says that it has written into the blocks of the request. awaited: the request waits for that."""

    request: str
    awaited: bool

    def text(self) -> str:
        return "the peer has written into its blocks" + ("" if self.awaited else ", and it does not wait for that")
