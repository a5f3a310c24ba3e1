"""The invariants. Each is a function of the story so far and the event; its docstring is what `kvfix explain` prints.

A check answers None (valid), or (verdict, the arithmetic, the earlier event that this one contradicts). Where the
record began after the request did, or the source cannot tell a count, the verdict is "unknown": never a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger.book import Story
    from kvfix.ledger.events import Event

Outcome = Optional["tuple[str, str, Event | None]"]


class Rule(NamedTuple):
    """`code` and `name` are for users; `on` is the event at which the rule is looked at."""

    code: str
    name: str
    on: type
    check: Callable[[Story, Any], Outcome]

    @property
    def doc(self) -> str:
        return self.check.__doc__ or ""


RULES: list[Rule] = []
RULES_FOR: dict[type, list[Rule]] = {}


def rule(code: str, name: str, on: type) -> Callable[[Callable[[Any, Any], Outcome]], Callable[[Any, Any], Outcome]]:
    def register(check: Callable[[Any, Any], Outcome]) -> Callable[[Any, Any], Outcome]:
        made = Rule(code, name, on, check)
        RULES.append(made)
        RULES_FOR.setdefault(on, []).append(made)
        return check

    return register


def violated(message: str, earlier: Event | None = None) -> Outcome:
    return "violated", message, earlier


def unknown(message: str) -> Outcome:
    return "unknown", message, None


@rule("KVR001", "promise-out-of-bounds", ev.Asked)
def promise_out_of_bounds(story: Story, event: ev.Asked) -> Outcome:
    """A promise is at least 0, and leaves one token to compute, whose logits are the next token.

    0 <= promised <= total - 1 - computed; a load between steps may cover the last token too, vLLM then computes it
    again (vllm/v1/core/sched/scheduler.py 0.32.0, `_update_waiting_for_remote_kv`). Beyond it vLLM asserts.
    """
    if event.promised is None:
        return None
    room = event.total - event.computed - (0 if event.asynchronous else 1)
    if event.promised == 0 or 0 < event.promised <= room:
        return None
    return violated(
        f"promised {event.promised}, but of {event.total} tokens {event.computed} are computed: at most {max(0, room)}"
    )


@rule("KVR002", "promise-changed", ev.Asked)
def promise_changed(story: Story, event: ev.Asked) -> Outcome:
    """Asked again about the same state, the connector answers the same.

    vLLM asks on every step until it has blocks for the request. With the same hit, the same computed and total tokens,
    a different promise is made of something else than the balance. (LMCache issue 2158.)
    """
    before = story.asked
    if before is None or before.promised is None or event.promised is None or story.granted is not None:
        return None
    if (before.computed, before.total, before.hit) != (event.computed, event.total, event.hit) or event.hit is None:
        return None
    if before.promised == event.promised:
        return None
    due = max(0, event.hit - event.computed - (event.hit == event.total))
    return violated(
        f"promised {event.promised} where {before.promised} was promised before: hit {event.hit} - computed "
        f"{event.computed}{' - 1 (the whole request is hit)' if event.hit == event.total else ''} -> {due}",
        before,
    )


@rule("KVR003", "grant-differs-from-promise", ev.Granted)
def grant_differs(story: Story, event: ev.Granted) -> Outcome:
    """vLLM takes all of a promise or nothing of it.

    Nothing: another connector of a MultiConnector was chosen, prompt_logprobs are asked for, or vLLM's own prefix hit
    ends inside a block (vllm/v1/core/sched/scheduler.py 0.32.0:971-1027). Models with prefix replay take whole blocks
    of it (993-1005), whose size is not on record: then less is unknown.
    """
    if event.external == 0:
        return None
    if story.asked is None:
        if story.seen_from_start:
            return violated(f"granted {event.external}, and nothing was promised")
        return unknown(f"granted {event.external}; the record has no promise")
    if event.external == story.asked.promised:
        return None
    if story.asked.replay and event.external < (story.asked.promised or 0):
        return unknown(f"granted {event.external}, promised {story.asked.promised}: whole blocks of it are taken")
    return violated(f"granted {event.external}, promised {story.asked.promised}", story.asked)


@rule("KVR004", "load-differs-from-grant", ev.LoadDue)
def load_differs(story: Story, event: ev.LoadDue) -> Outcome:
    """What is loaded is what was granted, on top of what vLLM had; the last token of a full hit may be loaded too."""
    if story.granted is None or story.asked is None:
        if story.seen_from_start:
            return violated(f"tokens {event.start} to {event.end} are to be loaded, and none were granted")
        return unknown("the record has no grant")
    have, granted = story.asked.computed, story.granted.external
    if granted == 0:
        return violated(f"tokens {event.start} to {event.end} are to be loaded, and 0 were granted", story.granted)
    if event.start <= have and event.end in (have + granted, min(have + granted + 1, story.asked.total)):
        return None
    return violated(
        f"tokens {event.start} to {event.end} are to be loaded; computed {have} + granted {granted} = {have + granted}",
        story.granted,
    )


@rule("KVR005", "computed-differs-from-grant", ev.Scheduled)
def computed_differs(story: Story, event: ev.Scheduled) -> Outcome:
    """A request that comes from waiting has computed what vLLM had and what was granted.

    A prefix hit of vLLM that ends inside a block is shown to the connector as whole blocks: then, with nothing granted,
    it is up to a block more (scheduler.py 0.32.0:971-1027). After a load between steps that covers all, one less. With
    prefix replay up to a window less (1053-1124, 3159-3170); with nothing granted on top of a hit that the kinds of
    layers do not share, what they all have (1029-1038).
    """
    if not event.first or story.asked is None or story.granted is None:
        return None
    asked, granted = story.asked, story.granted.external
    expected = asked.computed + granted
    if event.computed == expected or (asked.asynchronous and event.computed == min(expected, asked.total - 1)):
        return None
    if granted == 0 and (event.computed > asked.computed or asked.divergent):
        return None
    if expected - asked.replay <= event.computed < expected:
        return None
    return violated(
        f"starts at {event.computed} computed tokens; vLLM had {asked.computed} + granted {granted} = {expected}", asked
    )


@rule("KVR006", "load-without-start", ev.Scheduled)
def load_without_start(story: Story, event: ev.Scheduled) -> Outcome:
    """Tokens that were granted are loaded before a step reads them."""
    if not event.first or story.granted is None or story.granted.external == 0 or story.due is not None:
        return None
    if not story.sees_loads:
        return unknown(f"{story.granted.external} tokens were granted; whether a load was started is not on record")
    return violated(f"{story.granted.external} tokens were granted, and no load of them was started", story.granted)


@rule("KVR007", "store-leaves-hole", ev.Stored)
def store_leaves_hole(story: Story, event: ev.Stored) -> Outcome:
    """Stores continue where the cache ends: what lies behind a hole can never be found, a hit is a prefix.

    (LMCache issue 4508: the hit is counted once per poll, and [hit, polls * hit) is never stored.)
    """
    covered = max(event.covered, story.stored_to or 0)
    if event.start <= covered:
        return None
    if not story.seen_from_start:
        return unknown(f"tokens {event.start} to {event.end} are stored; what was stored before is not on record")
    hole = f"{covered} to {event.start} never are"
    return violated(f"tokens {event.start} to {event.end} are stored, the cache holds {covered}: {hole}")


@rule("KVR008", "store-beyond-computed", ev.Stored)
def store_beyond_computed(story: Story, event: ev.Stored) -> Outcome:
    """What is stored has been computed."""
    if story.computed is None or event.end <= story.computed:
        return None
    return violated(f"tokens {event.start} to {event.end} are stored, {story.computed} are computed")


@rule("KVR009", "state-left-behind", ev.Left)
def state_left_behind(story: Story, event: ev.Left) -> Outcome:
    """When a request has ended, no dictionary, pin or lock speaks of it: it would leak, or meet a reused id."""
    return violated(f"{event.where} still holds it", story.finished)


@rule("KVR010", "waits-for-no-load", ev.Stuck)
def waits_for_no_load(story: Story, event: ev.Stuck) -> Outcome:
    """A request that waits for a load has one under way; else it waits for ever and keeps its blocks."""
    return violated(f"has waited {event.waited} steps for a load that nobody started", story.granted)


@rule("KVR012", "waits-for-lookup-again", ev.TimedOut)
def waits_for_lookup_again(story: Story, event: ev.TimedOut) -> Outcome:
    """After two lookups in a row that were waited for in vain no third is, at once: nothing else would be done.

    Half of the time may pass so at most: the scheduler stands still while a lookup is waited for. One is tried again at
    once, as the worker may be back.
    """
    before = story.timed_out
    if before is None or not story.timed_out_again or not event.is_at_once_after(before):
        return None
    after = event.at - before.at - event.waited
    return violated(
        f"{event.waited:g} s were waited for a lookup in vain, {after:.1f} s after the last, which was the second",
        before,
    )


@rule("KVR011", "exception-left-hook", ev.Raised)
def exception_left_hook(story: Story, event: ev.Raised) -> Outcome:
    """No exception leaves a connector hook or the scheduler: EngineCore dies of it, with every request it had."""
    return violated(f"{event.where}: {event.error}")


@rule("KVR013", "rank-loads-otherwise", ev.RankDiffers)
def rank_loads_otherwise(story: Story, event: ev.RankDiffers) -> Outcome:
    """Every rank begins the loads that the scheduler tells, and no other.

    A step's metadata reach all workers, whole and in order. Where one rank has not loaded what the others have, it
    computes on KV that is not there. To be seen only where the records of several processes are laid side by side.
    """
    tokens = f"tokens {event.start} to {event.end}"
    if event.told:
        return violated(f"rank {event.rank} has not begun to load {tokens}, which the scheduler told it", story.due)
    return violated(f"rank {event.rank} loads {tokens}, which the scheduler has not told it", story.due)
