"""The rules that the ledger checks. `kvfix explain` prints the docstring of a rule.

A rule compares an event with earlier events of the request, and returns None if the event is valid. Otherwise, the rule
returns ("violated", message, earlier). `earlier` is the earlier event that the event contradicts, or None. If events or
counts are missing, the rule returns "unknown" in place of "violated".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from kvfix.ledger import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.ledger import History
    from kvfix.ledger.events import Event

Outcome = Optional["tuple[str, str, Event | None]"]


class Rule(NamedTuple):
    """A rule. Users see `code` and `name`. `on` is the type of event that the rule checks."""

    code: str
    name: str
    on: type
    check: Callable[[History, Any], Outcome]

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
def promise_out_of_bounds(history: History, event: ev.Asked) -> Outcome:
    """`get_num_new_matched_tokens` promises at least 0 tokens and leaves at least one token for vLLM to compute.

    The limits are 0 <= promised <= total - 1 - computed. An asynchronous load may also cover the last token, because
    vLLM recomputes this token after the load (vllm/v1/core/sched/scheduler.py 0.32.0, `_update_waiting_for_remote_kv`).
    If the connector promises more tokens, an assertion in vLLM fails.
    """
    if event.promised is None:
        return None
    room = event.total - event.computed - (0 if event.asynchronous else 1)
    if event.promised == 0 or 0 < event.promised <= room:
        return None
    return violated(
        f"promised {event.promised}, but {event.computed} of {event.total} tokens are computed: at most {max(0, room)}"
    )


@rule("KVR002", "promise-changed", ev.Asked)
def promise_changed(history: History, event: ev.Asked) -> Outcome:
    """The connector promises the same number of tokens in each lookup of an unchanged request.

    vLLM repeats the lookup in every step until it can allocate blocks for the request. If the hit, the computed tokens
    and the total tokens have not changed, a different number of promised tokens is wrong (LMCache issue 2158).
    """
    before = history.asked
    if before is None or before.promised is None or event.promised is None or history.granted is not None:
        return None
    if (before.computed, before.total, before.hit) != (event.computed, event.total, event.hit) or event.hit is None:
        return None
    if before.promised == event.promised:
        return None
    balance = ev.balance(event.hit, event.computed, event.total)
    last = " - 1 (the whole request is hit)" if event.hit == event.total else ""
    due = f"hit {event.hit} - computed {event.computed}{last} = {balance}: {max(0, balance)} is due"
    return violated(f"promised {event.promised}, but an earlier lookup promised {before.promised}; {due}", before)


@rule("KVR003", "grant-differs-from-promise", ev.Granted)
def grant_differs(history: History, event: ev.Granted) -> Outcome:
    """vLLM takes all tokens that the connector promised, or none.

    vLLM takes 0 tokens in these cases (vllm/v1/core/sched/scheduler.py 0.32.0:971-1027):

    - MultiConnector has chosen a different connector for the load.
    - The request asks for prompt_logprobs.
    - vLLM's own prefix hit ends inside a block.
    - The request asks for routed experts, which vLLM does not know for hit tokens (`cap_external_hit`, 0.33.0:1191).

    For models with prefix replay, vLLM takes only whole blocks of the hit (0.32.0:993-1005). For these models,
    fewer tokens than promised give the verdict "unknown", because the events do not contain the block size.
    """
    if event.external == 0:
        return None
    if history.asked is None:
        if history.recorded_from_start:
            return violated(f"granted {event.external}, but nothing was promised")
        return unknown(f"granted {event.external}; the record has no promise")
    if event.external == history.asked.promised:
        return None
    if history.asked.replay and event.external < (history.asked.promised or 0):
        return unknown(f"granted {event.external}, promised {history.asked.promised}: vLLM takes whole blocks only")
    return violated(f"granted {event.external}, promised {history.asked.promised}", history.asked)


@rule("KVR004", "load-differs-from-grant", ev.LoadDue)
def load_differs(history: History, event: ev.LoadDue) -> Outcome:
    """A load covers the hit tokens that vLLM takes ("granted"). A load may also cover the last token of a full hit.

    The rule also accepts a load that starts before the granted tokens, or ends one token after the granted tokens. If
    the connector's metadata list whole blocks, the load may end less than one block after the granted tokens.
    """
    if history.granted is None or history.asked is None:
        if history.recorded_from_start:
            return violated(f"tokens {event.start} to {event.end} are to be loaded, but none were granted")
        return unknown("the record has no grant")
    have, granted = 0 if event.relative else history.asked.computed, history.granted.external
    if granted == 0:
        return violated(f"tokens {event.start} to {event.end} are to be loaded, but 0 were granted", history.granted)
    if event.start <= have and event.end in (have + granted, min(have + granted + 1, history.asked.total)):
        return None
    if event.start <= have and have + granted <= event.end < have + granted + event.block:
        return None
    return violated(
        f"tokens {event.start} to {event.end} are to be loaded; computed {have} + granted {granted} = {have + granted}",
        history.granted,
    )


@rule("KVR005", "computed-differs-from-grant", ev.Scheduled)
def computed_differs(history: History, event: ev.Scheduled) -> Outcome:
    """A request starts with the tokens in vLLM's own prefix cache plus the hit tokens that vLLM takes ("granted").

    The rule allows these differences (vllm/v1/core/sched/scheduler.py 0.32.0):

    - more tokens if 0 are granted, because vLLM passes only the whole blocks of its own hit to the connector (971-1027)
    - one token less after an asynchronous load, if the load covers all tokens of the request
    - up to `prefix_replay_tokens` fewer tokens for a model with prefix replay (1053-1124, 3159-3170)
    - fewer tokens if 0 are granted and the KV groups' hits differ, because vLLM keeps the smallest hit (1029-1038)
    """
    if not event.first or history.asked is None or history.granted is None:
        return None
    asked, granted = history.asked, history.granted.external
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
def load_without_start(history: History, event: ev.Scheduled) -> Outcome:
    """The connector starts to load the hit tokens that vLLM takes ("granted") before a step reads these tokens."""
    if not event.first or history.granted is None or history.granted.external == 0 or history.due is not None:
        return None
    if not history.sees_loads:
        return unknown(f"{history.granted.external} tokens were granted; the record cannot show if a load was started")
    return violated(f"{history.granted.external} tokens were granted, but no load of them was started", history.granted)


@rule("KVR007", "store-leaves-hole", ev.Stored)
def store_leaves_hole(history: History, event: ev.Stored) -> Outcome:
    """A store leaves no hole after the cached tokens. A hit is a prefix, so no hit contains tokens after a hole.

    With LMCache issue 4508, each of n lookups adds the hit to the stored tokens. So no store has tokens [hit, n * hit).
    """
    covered = max(event.covered, history.stored_to or 0)
    if event.start <= covered:
        return None
    if not history.recorded_from_start:
        return unknown(f"tokens {event.start} to {event.end} are stored; the record has no earlier stores")
    hole = f"the cache holds only {covered} tokens, so tokens {covered} to {event.start} are never stored"
    return violated(f"tokens {event.start} to {event.end} are stored, but {hole}")


@rule("KVR008", "store-beyond-computed", ev.Stored)
def store_beyond_computed(history: History, event: ev.Stored) -> Outcome:
    """A store contains only tokens that vLLM has computed."""
    if history.computed is None or event.end <= history.computed:
        return None
    return violated(f"tokens {event.start} to {event.end} are stored, {history.computed} are computed")


@rule("KVR009", "state-left-behind", ev.Left)
def state_left_behind(history: History, event: ev.Left) -> Outcome:
    """No dictionary, pin or lock holds an ended request. Otherwise state leaks, or a later request uses the state."""
    return violated(f"{event.where} still holds it", history.finished)


@rule("KVR010", "waits-for-no-load", ev.Stuck)
def waits_for_no_load(history: History, event: ev.Stuck) -> Outcome:
    """A request that waits for a load has a load in flight. Otherwise the request waits and keeps blocks for ever."""
    return violated(f"has waited {event.waited} steps for a load that was never started", history.granted)


@rule("KVR012", "waits-for-lookup-again", ev.TimedOut)
def waits_for_lookup_again(history: History, event: ev.TimedOut) -> Outcome:
    """After two lookup timeouts in a row, the scheduler pauses before it waits for a third lookup.

    The scheduler is blocked while it waits for a lookup. If each pause is as long as the previous wait, the scheduler
    is blocked for at most half of the time. The rule allows one immediate retry, because the worker may have recovered.
    """
    before = history.timed_out
    if before is None or not history.timed_out_again or not event.is_at_once_after(before):
        return None
    after = event.at - before.at - event.waited
    return violated(
        f"a lookup began {after:.1f} s after two timeouts in a row, and timed out after {event.waited:g} s", before
    )


@rule("KVR011", "exception-left-hook", ev.Raised)
def exception_left_hook(history: History, event: ev.Raised) -> Outcome:
    """Connector hooks and scheduler functions do not raise, because an exception ends EngineCore and its requests."""
    return violated(f"{event.where}: {event.error}")


@rule("KVR014", "store-of-lost-blocks", ev.BlocksLost)
def store_of_lost_blocks(history: History, event: ev.BlocksLost) -> Outcome:
    """A store reads only blocks that its request holds. No step writes to the blocks before the store has ended.

    vLLM keeps only the last blocks of a sliding window, and replaces the earlier blocks by null block 0. Other requests
    get the replaced blocks (`remove_skipped_blocks`, v1/core/single_type_kv_cache_manager.py 0.32.0:672). A store from
    replaced blocks puts wrong KV under a valid key, and a hit gives wrong text. (With `--separate-object-groups`,
    `lmcache server` skips a chunk if all window blocks of the chunk are null.)

    The rule checks a store in the store's own step and in the next step. After the next step, the store may have ended.
    """
    return violated(f"tokens {event.start} to {event.end} of KV group {event.group} are stored from {event.blocks}")


@rule("KVR027", "cache-differs-from-computed", ev.Compared)
def cache_differs_from_computed(history: History, event: ev.Compared) -> Outcome:
    """For each token, the KV in the external cache equals the KV that vLLM computes, except for rounding.

    Only the audit checks this rule (`KVFIX="check audit=0.001"`, docs/verify.md). The audit compares K and V of each
    layer and chunk. The difference is the norm of (cached - computed), divided by the norm of the computed K or V.
    Rounding explains a difference of up to 8 * eps * sqrt(layer + 1). eps is the machine epsilon of the KV's type, at
    least 2**-10. A hit of a wrong chunk gives wrong text. Wrong chunks stay in the cache until you clear the cache.
    """
    if not event.wrong:
        return None
    return violated(
        f"{event.wrong} of {event.chunks} chunks differ from the computed KV. The first, tokens {event.start} to "
        f"{event.end}: {event.part} of {event.layer} differs by {event.error:.2g} times its norm, most at "
        f"token {event.token}; rounding explains {event.limit:.2g}"
    )


@rule("KVR015", "lease-ended-twice", ev.LeaseEnded)
def lease_ended_twice(history: History, event: ev.LeaseEnded) -> Outcome:
    """The connector reports a request as sent at most once, and only if vLLM keeps the request's blocks for a peer.

    When vLLM gets the report, vLLM frees the blocks and forgets the request. A second report ends EngineCore, because
    vLLM asserts that it knows the request (vllm/v1/core/sched/scheduler.py 0.32.0:3234).
    """
    if history.lease_ended is not None:
        return violated("reported as sent a second time", history.lease_ended)
    if history.lease is not None:
        return None
    if history.recorded_from_start:
        return violated("reported as sent, but its blocks were not kept for a peer")
    return unknown("reported as sent; the record cannot show if its blocks were kept for a peer")
