"""`kvfix lab replay FILE`: play the events of an engine's recorder file in the lab, as far as possible.

The file omits prompts, and steps without an event. The lab invents prompts, and makes steps until each event occurs.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from kvfix.ledger import Finding
from kvfix.ledger import events as ev
from kvfix.ledger.events import Event
from kvfix_tools import recording, replay
from kvfix_tools.lab import runner
from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.releases import lacking
from kvfix_tools.lab.steps import prompt

#: {class name of a connector: its name in the lab}. A recorder file has only the class names of connectors.
KINDS = {"LMCacheConnectorV1": "v1", "LMCacheMPConnector": "mp", "LMCacheMPConnectorUpstream": "mp-in-tree"}
#: ENDLESS: max_tokens so large that a request runs until its event Finished. MOST_STEPS: maximum steps for one event.
ENDLESS, MOST_STEPS = 1 << 14, 2000


class Replayed(NamedTuple):
    """findings: kvfix's reports in the lab. on_record: violations in the file. short: what the lab could not replay."""

    findings: list[Finding]
    on_record: list[Finding]
    short: list[str]


def kinds(findings: list[Finding]) -> list[list[str]]:
    """Return [rule, request] of each finding, without duplicates, in the order of the findings."""
    return [list(kind) for kind in dict.fromkeys((finding.code, finding.request) for finding in findings)]


def options(found: recording.Recording) -> Options:
    """Return lab options. Raise ValueError unless just one scheduler in the file has sizes and a connector of KINDS."""
    lines = [line for line in found.connectors.values() if line.get("role") == "SCHEDULER"]
    known = [line for line in lines if line["name"] in KINDS and line.get("sizes")]
    if len(known) != 1:
        names = ", ".join(sorted({line["name"] for line in lines})) or "none"
        raise ValueError(f"the lab needs exactly one scheduler with {' or '.join(KINDS)}, but the file has: {names}")
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


def replay_file(path: Path, fixes: bool) -> Replayed:
    """Play a recorder file. Raises OSError and ValueError for a file that cannot be played."""
    found = recording.read(path)
    wanted = options(found)
    roles = {number: line.get("role") for number, line in found.connectors.items()}
    events = [entry.event for entry in found.entries if roles.get(entry.connector) == "SCHEDULER"]
    with runner.applied(fixes, "check"):
        player = _Player(LabEngine(wanted), events)
        with runner.reported() as reported, suppress(EngineDied):
            player.play()
    judged = [each.finding for each in replay.judged(found) if roles.get(each.entry.connector) != "WORKER"]
    return Replayed(reported, [finding for finding in judged if finding.verdict == "violated"], player.short)


class _Player:
    """Makes the events of a file happen in order. Methods such as `_asked` each cause one class of events."""

    def __init__(self, engine: LabEngine, events: list[Event]) -> None:
        self.engine = engine
        self.events = events
        self.short: list[str] = []
        self._seeds: dict[str, int] = {}
        self._reached: dict[str, int] = {}

    def play(self) -> None:
        for at, event in enumerate(self.events):
            make = getattr(self, f"_{type(event).__name__.lower()}", None)
            if make is not None:
                make(event, [later for later in self.events[at + 1 :] if later.request == event.request])
        self.engine.free_blocks()
        self.engine.budget(self.engine.options.max_num_batched_tokens)
        runner.let_leaks_be_reported(self.engine)

    def _asked(self, event: ev.Asked, later: list[Event]) -> None:
        engine, name = self.engine, event.request
        if name not in engine.requests or engine.requests[name].is_finished():
            self._seeds[name] = self._seed(event)
            engine.admit(name, prompt(event.total, self._seeds[name]), ENDLESS)
        tokens = list(engine.requests[name].all_token_ids)
        if event.hit:
            engine.do("stored_elsewhere", tokens[: event.hit])
        follows = later[0] if later else None
        if isinstance(follows, ev.TimedOut):
            engine.do("lookups_fail", 1)
        block = engine.options.block_size
        engine.free_blocks()
        engine.keep_blocks(min(engine.free(), event.computed // block))
        if isinstance(follows, ev.Granted):
            engine.free_blocks()
            until_asked = takewhile(lambda each: not isinstance(each, ev.Asked), later)
            if any(isinstance(each, ev.LoadFailed) for each in until_asked):
                engine.fail_load(name, 0)
            first = next((each for each in later if isinstance(each, ev.Scheduled) and each.first), None)
            others = sum(each.num_tokens - each.num_computed_tokens for each in engine.scheduler.running)
            most = engine.options.max_num_batched_tokens
            engine.budget(min(most, first.tokens + others) if first is not None else most)
        engine.step()

    def _scheduled(self, event: ev.Scheduled, later: list[Event]) -> None:
        self._reached[event.request] = event.computed + event.tokens
        request = self.engine.requests.get(event.request)
        if request is not None and not event.first:
            self._compute(request, event.computed + event.tokens)

    def _preempted(self, event: ev.Preempted, later: list[Event]) -> None:
        """Make steps until the request reaches the token counts of its next `Asked` event. Then preempt the request."""
        request = self.engine.requests.get(event.request)
        asked = next((each for each in later if isinstance(each, ev.Asked)), None)
        if request is None or request not in self.engine.scheduler.running:
            self.short.append(f"vLLM preempted request {event.request}, which does not run in the lab at this point")
            return
        if asked is not None:
            self._compute(request, asked.computed)
            self._step_until(lambda: request.num_tokens >= asked.total)
        if request in self.engine.scheduler.running:
            self.engine.preempt(event.request)

    def _finished(self, event: ev.Finished, later: list[Event]) -> None:
        request = self.engine.requests.get(event.request)
        if request is None or request.is_finished():
            return
        if event.aborted:
            self.engine.abort(event.request)
            return
        self._step_until(lambda: request.is_finished() or request.num_output_tokens > 0)
        request.max_tokens = max(1, request.num_output_tokens)
        self._step_until(request.is_finished)

    def _compute(self, request: Any, tokens: int) -> None:
        """Compute exactly `tokens` tokens of the request, because the request's stores depend on this number."""
        self._step_until(
            lambda: request not in self.engine.scheduler.running or request.num_computed_tokens >= tokens,
            lambda: tokens - request.num_computed_tokens + len(self.engine.scheduler.running) - 1,
        )

    def _step_until(self, done: Callable[[], bool], budget: Callable[[], int] | None = None) -> None:
        self.engine.free_blocks()
        most = self.engine.options.max_num_batched_tokens
        for _ in range(MOST_STEPS):
            if done():
                return
            self.engine.budget(min(most, budget()) if budget is not None else most)
            self.engine.step()
        self.short.append(f"an event of the file did not happen in the lab within {MOST_STEPS} steps")

    def _seed(self, event: ev.Asked) -> int:
        """Return a seed for the prompt. For a prefix hit, reuse the seed of a request with enough computed tokens."""
        if event.computed:
            for name, reached in reversed(self._reached.items()):
                if reached >= event.computed and name in self._seeds:
                    return self._seeds[name]
        return len(self._seeds)
