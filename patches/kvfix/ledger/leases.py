"""The rules of leases: blocks that an engine keeps for a peer, which reads them, or into whose blocks they are written.

As in rules.py, of which these are a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.ledger import events as ev
from kvfix.ledger.rules import Outcome, rule, unknown, violated

if TYPE_CHECKING:
    from kvfix.ledger.history import History


@rule("KVR015", "lease-ended-twice", ev.LeaseEnded)
def lease_ended_twice(history: History, event: ev.LeaseEnded) -> Outcome:
    """A request is reported as sent once, and only if its blocks were kept for a peer.

    vLLM frees the blocks of a request that is reported as sent, and asserts that it knows it
    (vllm/v1/core/sched/scheduler.py 0.32.0:3234): the second report ends EngineCore.
    """
    if history.lease_ended is not None:
        return violated("it is reported as sent a second time", history.lease_ended)
    if history.lease is not None:
        return None
    if history.recorded_from_start:
        return violated("it is reported as sent, and its blocks were not kept for a peer")
    return unknown("it is reported as sent; whether its blocks were kept is not on record")


@rule("KVR017", "read-outlives-lease", ev.LeaseRead)
def read_outlives_lease(history: History, event: ev.LeaseRead) -> Outcome:
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


@rule("KVR018", "lease-read-twice", ev.LeaseRead)
def lease_read_twice(history: History, event: ev.LeaseRead) -> Outcome:
    """One request of the peer reads the blocks: after its notice they are free (nixl/pull_worker.py 0.32.0:684)."""
    before = history.lease_read
    if before is None or before.reader == event.reader:
        return None
    return violated(f"{event.reader} has loaded its blocks, which were free after {before.reader} had", before)


@rule("KVR020", "written-after-lease", ev.WriteBegun)
def written_after_lease(history: History, event: ev.WriteBegun) -> Outcome:
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
    begun = history.write_begun
    if begun is None:
        return None
    return violated(f"its blocks are free, and a write of them to {begun.reader} is in flight", begun)


@rule("KVR022", "written-unawaited", ev.Written)
def written_unawaited(history: History, event: ev.Written) -> Outcome:
    """A peer writes only into blocks of a request that waits for it: others may have them, and their KV is lost."""
    return None if event.awaited else violated("the peer has written into its blocks, and it does not wait for that")


@rule("KVR025", "lease-not-returned", ev.NotReturned)
def lease_not_returned(history: History, event: ev.NotReturned) -> Outcome:
    """A request that is to read what a peer keeps gives it back, whether it has read it or has ended before.

    Else the blocks are kept until their time, 30 s as vLLM comes (nixl/base_scheduler.py 0.32.0:73), and are missing to
    others. A load that failed gives nothing back, which is as vLLM has it. Neither engine's record alone shows it.
    """
    done = "has loaded its blocks" if event.loaded else "has ended"
    how = "their lease has ended by its time" if event.expired else "they are still kept"
    return violated(f"{event.reader} {done} and has not given them back: {how}", history.lease)


@rule("KVR026", "read-of-freed-blocks", ev.LeaseRead)
def read_of_freed_blocks(history: History, event: ev.LeaseRead) -> Outcome:
    """A peer reads only what is kept for it: the blocks of a request that ended otherwise are free from its end on."""
    if history.finished is None or history.lease is not None:
        return None
    if not history.recorded_from_start:
        return unknown(f"{event.reader} has loaded its blocks; whether they were kept is not on record")
    return violated(f"{event.reader} has loaded its blocks, which were free from its end on", history.finished)
