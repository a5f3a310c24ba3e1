"""The rules of what the records of several processes show: ranks of an engine, or two engines of which one keeps blocks
for the other. They are registered with those of `kvfix.ledger`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix.ledger import events as ev
from kvfix.ledger.rules import Outcome, rule, unknown, violated
from kvfix_tools.ledger.events import LeaseRead, NotReturned, RankDiffers, WriteBegun, WriteEnded, Written

if TYPE_CHECKING:
    from kvfix.ledger.history import History


def _last(history: History, *kinds: type) -> Any:
    """The last event of these kinds; None if the history has none."""
    return next((event for event in reversed(history.events) if isinstance(event, kinds)), None)


@rule("KVR013", "rank-loads-otherwise", RankDiffers)
def rank_loads_otherwise(history: History, event: RankDiffers) -> Outcome:
    """Every rank starts the loads in the scheduler's metadata, and no others.

    The metadata of a step reach all workers completely and in order. A rank that skips a load computes on KV that was
    not loaded. Only a comparison of the records of several processes shows it.
    """
    tokens = f"tokens {event.start} to {event.end}"
    if event.told:
        return violated(f"rank {event.rank} has not started the load of {tokens} that was scheduled", history.due)
    return violated(f"rank {event.rank} loads {tokens}, which was not scheduled", history.due)


@rule("KVR017", "read-outlives-lease", LeaseRead)
def read_outlives_lease(history: History, event: LeaseRead) -> Outcome:
    """A peer reads blocks only as long as they are kept for it.

    A read brings its notice with it (nixl/pull_worker.py 0.32.0:546). So where the lease has ended by its time, the
    read ended later: what it has loaded may be what others have written since. No clocks are compared. A write that
    was done in the same step in which the lease ended is not told from one that went on (push_worker.py 0.32.0:818).
    """
    ended = history.lease_ended
    if ended is None or ended.expired is False:
        return None
    if event.pushed:
        return unknown(f"its blocks were written to {event.reader}; whether before their lease ended is not on record")
    if ended.expired is None:
        return unknown(f"{event.reader} has loaded its blocks; how their lease ended is not on record")
    return violated(f"{event.reader} has loaded its blocks, and their lease was over before", ended)


@rule("KVR018", "lease-read-twice", LeaseRead)
def lease_read_twice(history: History, event: LeaseRead) -> Outcome:
    """One request of the peer reads the blocks: after its notice they are free (nixl/pull_worker.py 0.32.0:684)."""
    before = _last(history, LeaseRead)
    if before is None or before.reader == event.reader:
        return None
    return violated(f"{event.reader} has loaded its blocks, which were free after {before.reader} had", before)


@rule("KVR020", "written-after-lease", WriteBegun)
def written_after_lease(history: History, event: WriteBegun) -> Outcome:
    """An engine writes blocks to its peer only as long as it keeps them.

    Once they are reported as sent they are free (vllm/v1/core/sched/scheduler.py 0.32.0:3234), and others write there:
    the peer gets their KV, and takes it for the prompt's.
    """
    if history.lease_ended is None:
        return None
    return violated(f"a write to {event.reader} begins, and its blocks are free", history.lease_ended)


@rule("KVR021", "lease-ends-while-written", ev.LeaseEnded)
def lease_ends_while_written(history: History, event: ev.LeaseEnded) -> Outcome:
    """An engine keeps the blocks that it writes to its peer until the write is done, whenever their lease ends."""
    begun = _last(history, WriteBegun, WriteEnded)
    if not isinstance(begun, WriteBegun):
        return None
    return violated(f"its blocks are free, and a write of them to {begun.reader} is in flight", begun)


@rule("KVR022", "written-unawaited", Written)
def written_unawaited(history: History, event: Written) -> Outcome:
    """A peer writes only into blocks of a request that waits for it: others may have them, and their KV is lost."""
    return None if event.awaited else violated("the peer has written into its blocks, and it does not wait for that")


@rule("KVR025", "lease-not-returned", NotReturned)
def lease_not_returned(history: History, event: NotReturned) -> Outcome:
    """A request that is to read what a peer keeps gives it back, whether it has read it or has ended before.

    Else the blocks are kept until their time, 30 s as vLLM comes (nixl/base_scheduler.py 0.32.0:73), and are missing to
    others. A load that failed gives nothing back, which is as vLLM has it. Neither engine's record alone shows it.
    """
    done = "has loaded its blocks" if event.loaded else "has ended"
    how = "their lease has ended by its time" if event.expired else "they are still kept"
    return violated(f"{event.reader} {done} and has not given them back: {how}", history.lease)


@rule("KVR026", "read-of-freed-blocks", LeaseRead)
def read_of_freed_blocks(history: History, event: LeaseRead) -> Outcome:
    """A peer reads only what is kept for it: the blocks of a request that ended otherwise are free from its end on."""
    if history.finished is None or history.lease is not None:
        return None
    if not history.recorded_from_start:
        return unknown(f"{event.reader} has loaded its blocks; whether they were kept is not on record")
    return violated(f"{event.reader} has loaded its blocks, which were free from its end on", history.finished)
