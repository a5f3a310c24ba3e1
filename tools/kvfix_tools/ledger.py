"""Define those events and rules of the ledger (kvfix.ledger) that only the tools use.

A single process of an engine cannot record these events. kvfix gets the events from the lab, or from the recordings of
several processes. The decorator `rule` adds each rule to the list RULES. For all rules, import RULES from this module.
"""

from typing import Any, NamedTuple

from kvfix.ledger import History
from kvfix.ledger import events as ev
from kvfix.ledger.rules import RULES as RULES
from kvfix.ledger.rules import Outcome, rule, unknown, violated
from kvfix.ledger.rules import Rule as Rule


class RankDiffers(NamedTuple):
    """Only the scheduler or only the rank has recorded this load of the tokens [start, end)."""

    request: str
    rank: int
    start: int
    end: int
    told: bool  # True if the scheduler ordered the load, False if the rank started the load without an order

    def text(self) -> str:
        what = "was scheduled but not started" if self.told else "was started but not scheduled"
        return f"rank {self.rank}: the load of tokens {self.start} to {self.end} {what}"


class LeaseRead(NamedTuple):
    """`reader`, a request of the peer, has loaded the blocks that the engine keeps after the end of `request`."""

    request: str
    reader: str
    pushed: bool = False  # True: prefill wrote the KV to the reader (push). False: the reader fetched the KV (pull)

    def text(self) -> str:
        return f"the peer's request {self.reader} has loaded the kept blocks"


class NotReturned(NamedTuple):
    """The peer's request `reader` no longer needs the kept blocks of `request`, but no release message has arrived."""

    request: str
    reader: str
    loaded: bool  # True if `reader` has loaded the blocks, False if `reader` ended without loading
    expired: bool  # True if the lease timed out, False if the blocks are still kept

    def text(self) -> str:
        done = "has loaded the kept blocks" if self.loaded else "has ended"
        return f"the peer's request {self.reader} {done}, but no release message has arrived"


class WriteBegun(NamedTuple):
    """The worker begins to write the kept blocks of `request` into blocks of the peer's request `reader`."""

    request: str
    reader: str

    def text(self) -> str:
        return f"a write of the kept blocks to the peer's request {self.reader} begins"


class WriteEnded(NamedTuple):
    """The worker's write to the peer has ended or failed. The worker no longer reads the kept blocks of `request`."""

    request: str

    def text(self) -> str:
        return "the write of the kept blocks has ended"


class Written(NamedTuple):
    """The peer reports a write into blocks of `request`. awaited: True if `request` waits for this write."""

    request: str
    awaited: bool

    def text(self) -> str:
        text = "the peer has written into blocks of the request"
        return text if self.awaited else f"{text}, which does not wait for the write"


def _last(history: History, *kinds: type) -> Any:
    return next((event for event in reversed(history.events) if isinstance(event, kinds)), None)


@rule("KVR013", "rank-loads-otherwise", RankDiffers)
def rank_loads_otherwise(history: History, event: RankDiffers) -> Outcome:
    """Every rank starts the loads in the scheduler's metadata, and no others.

    A rank that skips a load computes with blocks whose KV is not loaded. vLLM sends the metadata of each step to all
    workers, completely and in order. To find a violation, kvfix compares the records of several processes.
    """
    tokens = f"tokens {event.start} to {event.end}"
    if event.told:
        return violated(f"rank {event.rank} did not start the scheduled load of {tokens}", history.due)
    return violated(f"rank {event.rank} loads {tokens}, but this load was not scheduled", history.due)


@rule("KVR017", "read-outlives-lease", LeaseRead)
def read_outlives_lease(history: History, event: LeaseRead) -> Outcome:
    """A peer reads blocks only while their lease lasts.

    After the lease, another request may have the blocks. A read that ends later may load the KV of this other request.
    At its end, each read sends a release message (nixl/pull_worker.py 0.32.0:546). If a lease times out, no release
    message has arrived, so no read has ended yet. In push mode, prefill writes the blocks. A write may end in the step
    in which the lease times out (push_worker.py 0.32.0:822). The rule compares no clocks, so a push gets "unknown".
    """
    ended = history.lease_ended
    if ended is None or ended.expired is False:
        return None
    if event.pushed:
        return unknown(f"the record does not show if the write to request {event.reader} ended before the lease ended")
    if ended.expired is None:
        return unknown(f"{event.reader} has loaded the kept blocks; the record does not show how their lease ended")
    return violated(f"{event.reader} has loaded the kept blocks after their lease had timed out", ended)


@rule("KVR018", "lease-read-twice", LeaseRead)
def lease_read_twice(history: History, event: LeaseRead) -> Outcome:
    """Only one request of the peer reads the kept blocks. This request's release message frees the blocks.

    After this release, vLLM may give the blocks to a new request. A second reader may then load the KV of the new
    request (nixl/pull_worker.py 0.32.0:684).
    """
    before = _last(history, LeaseRead)
    if before is None or before.reader == event.reader:
        return None
    what = f"{event.reader} has loaded the kept blocks, which the read by {before.reader} had already freed"
    return violated(what, before)


@rule("KVR020", "written-after-lease", WriteBegun)
def written_after_lease(history: History, event: WriteBegun) -> Outcome:
    """An engine writes blocks to its peer only while it keeps these blocks.

    vLLM frees blocks that a connector reports as sent (vllm/v1/core/sched/scheduler.py 0.32.0:3235). Other requests
    then write their KV into the blocks. A later write to the peer sends this KV, and the peer uses wrong KV.
    """
    if history.lease_ended is None:
        return None
    return violated(f"a write to {event.reader} begins, but the blocks are free already", history.lease_ended)


@rule("KVR021", "lease-ends-while-written", ev.LeaseEnded)
def lease_ends_while_written(history: History, event: ev.LeaseEnded) -> Outcome:
    """An engine that writes blocks to its peer keeps the blocks until the write ends, even if the lease ends first."""
    begun = _last(history, WriteBegun, WriteEnded)
    if not isinstance(begun, WriteBegun):
        return None
    return violated(f"vLLM freed the kept blocks before the write of these blocks to {begun.reader} ended", begun)


@rule("KVR022", "written-unawaited", Written)
def written_unawaited(history: History, event: Written) -> Outcome:
    """A peer writes only into blocks of a request that waits for the write.

    If no request waits, another request may have the blocks, and the peer overwrites the KV of this other request.
    """
    return None if event.awaited else violated("the peer has written into blocks of a request that does not wait")


@rule("KVR025", "lease-not-returned", NotReturned)
def lease_not_returned(history: History, event: NotReturned) -> Outcome:
    """A request releases the blocks that a peer keeps for the request, even if the request never reads the blocks.

    Without a release message, the peer keeps the blocks until a timeout, and no other request can use the blocks. The
    default timeout is 30 s (nixl/base_scheduler.py 0.32.0:82). After a failed load, vLLM sends no release message, and
    the rule is not violated. To find a violation, kvfix compares the records of both engines.
    """
    done = "has loaded the kept blocks" if event.loaded else "has ended"
    how = "their lease has timed out" if event.expired else "the blocks are still kept"
    return violated(f"the peer's request {event.reader} {done}, but did not release the blocks: {how}", history.lease)


@rule("KVR026", "read-of-freed-blocks", LeaseRead)
def read_of_freed_blocks(history: History, event: LeaseRead) -> Outcome:
    """A peer reads only blocks that are kept for the peer. vLLM frees all other blocks when their request ends."""
    if history.finished is None or history.lease is not None:
        return None
    if not history.recorded_from_start:
        return unknown(f"{event.reader} has loaded the blocks; the record does not show if they were kept")
    return violated(f"{event.reader} has loaded the blocks, which were free since the request's end", history.finished)
