"""One line of text for each event, with its arithmetic: for histories in reports, in the lab and in kvfix-diagnose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from kvfix.ledger.events import Event


def line(event: Event) -> str:
    """The text of the event, without the request id: a history has only one."""
    return globals()["_" + type(event).__name__.lower()](event)  # type: ignore[no-any-return]


def _asked(event: ev.Asked) -> str:
    if event.promised is None:
        return f"match({event.computed}) answers: not known yet"
    answer = f"match({event.computed}) promises {event.promised}"
    if event.hit is None:
        return answer
    last = " - 1" if event.hit == event.total else ""
    balance = ev.balance(event.hit, event.computed, event.total)
    arithmetic = f"hit {event.hit} - computed {event.computed}{last} = {balance}"
    due = max(0, balance)
    if event.promised != due:
        return f"{answer}, but {arithmetic}: {due} is due"
    return f"{answer}: {arithmetic}" + (", nothing to load" if balance < 0 else "")


def _granted(event: ev.Granted) -> str:
    return f"blocks found, {event.external} external tokens granted"


def _scheduled(event: ev.Scheduled) -> str:
    start = "admitted" if event.first else "continues"
    return f"{start} at {event.computed} computed tokens, {event.tokens} more are computed"


def _loaddue(event: ev.LoadDue) -> str:
    return f"tokens {event.start} to {event.end} are to be loaded"


def _loaded(event: ev.Loaded) -> str:
    return f"{event.tokens} tokens loaded, up to {event.end}"


def _stored(event: ev.Stored) -> str:
    return f"tokens {event.start} to {event.end} stored"


def _blockslost(event: ev.BlocksLost) -> str:
    return f"tokens {event.start} to {event.end} of KV group {event.group} stored from {event.blocks}"


def _preempted(event: ev.Preempted) -> str:
    return "preempted: its blocks are freed"


def _loadfailed(event: ev.LoadFailed) -> str:
    return "its load failed" + ("" if event.computed is None else f", back to {event.computed} computed tokens")


def _finished(event: ev.Finished) -> str:
    return "aborted" if event.aborted else "finished"


def _left(event: ev.Left) -> str:
    return f"ended, and {event.where} still holds it"


def _stuck(event: ev.Stuck) -> str:
    return f"waits for a load that was never started, for {event.waited} steps"


def _rankdiffers(event: ev.RankDiffers) -> str:
    what = "was scheduled and not started" if event.told else "was started and not scheduled"
    return f"rank {event.rank}: the load of tokens {event.start} to {event.end} {what}"


def _leased(event: ev.Leased) -> str:
    return "its blocks are kept for a peer" + ("" if event.seconds is None else f", for {event.seconds:g} s")


def _leaseextended(event: ev.LeaseExtended) -> str:
    return "the peer renews its lease" + ("" if event.seconds is None else f", for {event.seconds:g} s")


def _leaseread(event: ev.LeaseRead) -> str:
    return f"{event.reader} has loaded its blocks"


def _leaseended(event: ev.LeaseEnded) -> str:
    how = {None: "", True: ": its lease is over", False: " after a notice"}
    renewed = f", renewed {event.renewed} times" if event.renewed else ""
    return "its blocks are free" + how[event.expired] + renewed


def _readsfrom(event: ev.ReadsFrom) -> str:
    if event.pushed:
        return f"waits for engine {event.engine} to write the blocks of {event.peer}"
    return f"is to read the blocks that engine {event.engine} keeps of {event.peer}"


def _notreturned(event: ev.NotReturned) -> str:
    done = "has loaded its blocks" if event.loaded else "has ended"
    return f"{event.reader} {done}, and no notice has come"


def _writebegun(event: ev.WriteBegun) -> str:
    return f"a write of its blocks to {event.reader} begins"


def _writeended(event: ev.WriteEnded) -> str:
    return "the write of its blocks has ended"


def _written(event: ev.Written) -> str:
    return "the peer has written into its blocks" + ("" if event.awaited else ", and it does not wait for that")


def _raised(event: ev.Raised) -> str:
    return f"{event.where} raises {event.error}"


def _timedout(event: ev.TimedOut) -> str:
    return f"a lookup timed out after {event.waited:g} s"
