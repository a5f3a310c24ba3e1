"""`kvfix lab replay FILE`: what an engine's recorder has seen, made to happen again in the lab, as far as it is told.

On record are lengths, arrivals, answers of lookups, grants, preemptions, failed loads, ends; not prompts, nor the steps
in which nothing was told. So the lab's requests have prompts of their own, and it steps until what is next on record
can happen: who waited for blocks waits again, with as much of its prefix in vLLM as then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kvfix
from kvfix.ledger import Finding
from kvfix.ledger import events as ev
from kvfix_tools import recording, replay
from kvfix_tools.lab import checked
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.runner import lacking, quiet
from kvfix_tools.lab.scenario import prompt

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.lab.world import World

#: Connectors by the classes that vLLM loads. Which of the two with the same name it was, the recorder does not tell.
KINDS = {"LMCacheConnectorV1": "v1", "LMCacheMPConnector": "mp", "LMCacheMPConnectorUpstream": "mp-in-tree"}
#: Generated tokens of a request that has not ended on record; steps that are made for one event at most.
ENDLESS, PATIENCE = 1 << 14, 2000


class Rerun(NamedTuple):
    """findings: what the probes alarm about in the lab; on_record: what is violated in the record itself.

    short: what could not be made to happen, in words.
    """

    findings: list[Finding]
    on_record: list[Finding]
    short: list[str]


def kinds(findings: list[Finding]) -> list[list[str]]:
    """Rules and requests, each once, in order."""
    return [list(kind) for kind in dict.fromkeys((finding.code, finding.request) for finding in findings)]


def options(found: recording.Recording) -> Options:
    """The lab's for this record. Raises ValueError where it does not tell, or the lab has no such connector.

    Blocks are there in plenty: who waits on record is made to.
    """
    lines = [line for line in found.connectors.values() if line.get("role") == "SCHEDULER"]
    known = [line for line in lines if line["name"] in KINDS and line.get("sizes")]
    if len(known) != 1:
        names = ", ".join(sorted({line["name"] for line in lines})) or "none"
        raise ValueError(
            f"one scheduler's connector that the lab plays ({', '.join(KINDS)}) is needed; it has: {names}"
        )
    sizes = dict(known[0]["sizes"])
    lacks = lacking()
    settings = {name: value for name, value in sizes.pop("lmcache", {}).items() if name not in lacks}
    longest = max((entry.event.total for entry in found.entries if isinstance(entry.event, ev.Asked)), default=0)
    return Options(
        connector=KINDS[known[0]["name"]],
        num_blocks=4 * int(sizes.pop("num_blocks")),
        max_model_len=max(int(sizes.pop("max_model_len")), longest + ENDLESS),
        reserve_full_isl=False,
        lmcache=settings,
        **sizes,
    )


def rerun(path: Path, fixes: bool) -> Rerun:
    """Raises OSError and ValueError for a file that cannot be played."""
    found = recording.read(path)
    wanted = options(found)
    with quiet():
        from kvfix_tools.lab.world import Died, World

        kvfix.revert()
        kvfix.apply("check", only=None if fixes else [])
        try:
            world = World(wanted)
            play = _Play(world, [entry.event for entry in told(found)])
            with checked.alarms() as alarms, suppress(Died):
                play.all()
        finally:
            kvfix.revert()
    roles = {number: line.get("role") for number, line in found.connectors.items()}
    judged = [each.finding for each in replay.judged(found) if roles.get(each.entry.connector) != "WORKER"]
    return Rerun(alarms, [finding for finding in judged if finding.verdict == "violated"], play.short)


def told(found: recording.Recording) -> Iterator[Any]:
    """What the scheduler's side told."""
    roles = {number: line.get("role") for number, line in found.connectors.items()}
    return (entry for entry in found.entries if roles.get(entry.connector) == "SCHEDULER")


class _Play:
    def __init__(self, world: World, events: list[Event]) -> None:
        self.world = world
        self.events = events
        self.short: list[str] = []
        self._seeds: dict[str, int] = {}
        self._reached: dict[str, int] = {}

    def all(self) -> None:
        for at, event in enumerate(self.events):
            make = getattr(self, f"_{type(event).__name__.lower()}", None)
            if make is not None:
                make(event, [later for later in self.events[at + 1 :] if later.request == event.request])
        self.world.free_blocks()
        self.world.budget(self.world.options.max_num_batched_tokens)
        checked.look_for_left(self.world)

    def _asked(self, event: ev.Asked, later: list[Event]) -> None:
        world, name = self.world, event.request
        if name not in world.requests or world.requests[name].is_finished():
            self._seeds[name] = self._seed(event)
            world.admit(name, prompt(event.total, self._seeds[name]), ENDLESS)
        tokens = list(world.requests[name].all_token_ids)
        if event.hit:
            world.stored_elsewhere(tokens[: event.hit])
        follows = later[0] if later else None
        if isinstance(follows, ev.TimedOut):
            world.lookups_fail(1)
        block = world.options.block_size
        world.free_blocks()
        world.keep_blocks(min(world.free(), event.computed // block))
        if isinstance(follows, ev.Granted):
            world.free_blocks()
            if any(isinstance(each, ev.LoadFailed) for each in _until_asked(later)):
                world.fail_load(name, 0)
            first = next((each for each in later if isinstance(each, ev.Scheduled) and each.first), None)
            others = sum(each.num_tokens - each.num_computed_tokens for each in world.scheduler.running)
            most = world.options.max_num_batched_tokens
            world.budget(min(most, first.tokens + others) if first is not None else most)
        world.step()

    def _scheduled(self, event: ev.Scheduled, later: list[Event]) -> None:
        self._reached[event.request] = event.computed + event.tokens
        request = self.world.requests.get(event.request)
        if request is not None and not event.first:
            self._compute(request, event.computed + event.tokens)

    def _preempted(self, event: ev.Preempted, later: list[Event]) -> None:
        """When it is asked about again it has so many tokens, of which so many were computed."""
        request = self.world.requests.get(event.request)
        asked = next((each for each in later if isinstance(each, ev.Asked)), None)
        if request is None or request not in self.world.scheduler.running:
            self.short.append(f"{event.request} is not running where it was preempted")
            return
        if asked is not None:
            self._compute(request, asked.computed)
            self._step_until(lambda: request.num_tokens >= asked.total)
        if request in self.world.scheduler.running:
            self.world.preempt(event.request)

    def _finished(self, event: ev.Finished, later: list[Event]) -> None:
        request = self.world.requests.get(event.request)
        if request is None or request.is_finished():
            return
        if event.aborted:
            self.world.abort(event.request)
            return
        self._step_until(lambda: request.is_finished() or request.num_output_tokens > 0)
        request.max_tokens = max(1, request.num_output_tokens)
        self._step_until(request.is_finished)

    def _compute(self, request: Any, tokens: int) -> None:
        """So many of the request's tokens, and not one more: what is stored depends on it."""
        self._step_until(
            lambda: request not in self.world.scheduler.running or request.num_computed_tokens >= tokens,
            lambda: tokens - request.num_computed_tokens + len(self.world.scheduler.running) - 1,
        )

    def _step_until(self, done: Callable[[], bool], budget: Callable[[], int] | None = None) -> None:
        self.world.free_blocks()
        most = self.world.options.max_num_batched_tokens
        for _ in range(PATIENCE):
            if done():
                return
            self.world.budget(min(most, budget()) if budget is not None else most)
            self.world.step()
        self.short.append(f"nothing came of it in {PATIENCE} steps")

    def _seed(self, event: ev.Asked) -> int:
        """A prompt of its own; where vLLM had some of it already, the one of a request that has computed so much."""
        if event.computed:
            for name, reached in reversed(self._reached.items()):
                if reached >= event.computed and name in self._seeds:
                    return self._seeds[name]
        return len(self._seeds)


def _until_asked(later: list[Event]) -> Iterator[Event]:
    for event in later:
        if isinstance(event, ev.Asked):
            return
        yield event
