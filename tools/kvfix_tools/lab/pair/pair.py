"""Two lab engines: prefill and decode joined by a router and a network, or two engines that share LMCache's cache."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from kvfix import clock
from kvfix.ledger import Finding, Ledger
from kvfix.ledger.events import Event, Leased
from kvfix_tools.lab.connectors.mp import ADAPTER, MP
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.lab_engine import STEP, LabEngine, side_class
from kvfix_tools.lab.engine.memory import Cache
from kvfix_tools.lab.fuzz.parameters import MALFORMED, Params
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.pair.pair_engine import Engines, PairEngine, running
from kvfix_tools.lab.steps import continued

_ROLES = {"prefill": "producer", "decode": "consumer"}


class _Asked(NamedTuple):
    """A client's request. at_once: the router sends the request to both engines at the same time."""

    prompt: list[int]
    max_tokens: int
    at_once: bool


class Pair(Engines):
    """A prefill and a decode engine with a router. Has the interface of LabEngine, for `fuzz.play` and scenarios.

    The router works like vLLM's toy proxy. First, prefill computes the prompt and one token. Then decode gets the
    request with prefill's `kv_transfer_params`. In push mode, both engines may get the request at the same time.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.network = side_class(options).make_network(options)
        self.network.add = self.add
        self.ask_at_once = partial(self.ask, at_once=True)
        self.asked: dict[str, _Asked] = {}
        #: _takes: steps between prefill's output and the decode request. _to_send: (due step, request, parameters).
        self._takes = 0
        self._to_send: list[tuple[int, str, Params | None]] = []
        #: {request: parameters of its last decode request}, for `send_again`.
        self.sent: dict[str, Params] = {}
        #: Faults (keys of MALFORMED). Each of the next decode requests gets parameters with one of these faults.
        self.malformed: list[str] = []
        #: {request: its stop token}
        self._stops: dict[str, int] = {}
        #: {router's id of a request: number of suffixes}. As in vLLM, a request gets a new suffix in each engine.
        self._ids: Counter[str] = Counter()
        self.seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._starts = itertools.count(1)
        self.gone: list[PairEngine] = []
        self._findings: list[Finding] = []
        self._ledger = Ledger()
        self._log: list[tuple[int, Event]] = []
        #: True if loads may bring fewer tokens than the connector promised.
        self._faults = False
        self.prefill = self._start("prefill", options.num_blocks)
        self.decode = self._start("decode", options.decode_blocks or options.num_blocks)

    def _start(self, name: str, blocks: int) -> PairEngine:
        role = "kv_both" if self.options.extra.get("bidirectional_kv_xfer") else f"kv_{_ROLES[name]}"
        options = dataclasses.replace(self.options, num_blocks=blocks, kv_role=role)
        if name == "decode" and options.peer_ranks:
            options = dataclasses.replace(options, ranks=options.peer_ranks, peer_ranks=options.ranks)
        engine = PairEngine(options, self, name, f"{name}-{next(self._starts)}")
        clock.now = lambda: self.seconds
        if self._faults:
            engine.request_events.may_fail.add("")
        return engine

    @property
    def engines(self) -> tuple[PairEngine, PairEngine]:  # type: ignore[override]
        return self.prefill, self.decode

    def engine(self, name: str) -> PairEngine:
        return self.prefill if name == "prefill" else self.decode

    @property
    def findings(self) -> list[Finding]:
        return super().findings + self._findings

    @property
    def log(self) -> list[tuple[int, Event]]:
        return super().log + self._log

    @property
    def counts(self) -> Counter[str]:
        return Counter(super().counts + self._counts + self.network.counts)

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        getattr(self, step)(*arguments, **keywords)

    def abort(self, name: str) -> None:
        """Abort this request in both engines, as the router does if the client disconnects."""
        self._to_send = [each for each in self._to_send if each[1] != name]
        for engine in self.engines:
            for request in [each for each in engine.requests if each.rpartition("-")[0] == name]:
                if not engine.requests[request].is_finished():
                    engine.do("abort", request)

    def add(self, event: Event) -> None:
        """Record a lease event. If the event violates a rule, add a finding."""
        self._log.append((self.network.now, event))
        self._findings += [found for found in self._ledger.feed(event) if found.verdict == "violated"]

    def step(self, times: int = 1, name: str = "") -> None:
        """Make `times` steps of both engines, or only of the engine `name`. An engine without requests does nothing."""
        for _ in range(times):
            self.tick()
            for engine in self.engines:
                if engine.scheduler.has_requests() and name in ("", engine.name):
                    engine.iterate()

    def step_alone(self, name: str, times: int = 1) -> None:
        """Make `times` steps of one engine, and no steps of the other engine. Leases may expire."""
        self.may_fail()
        self.step(times, name)

    def tick(self) -> None:
        self.seconds += STEP
        self.network.tick()
        for address in self.network.dead_listeners:
            engine = self.engine(address.partition(":")[0])
            message = f"the {engine.name} engine answers no handshake any more"
            engine.request_events.violated(rules.THREAD_DIED, "", message)
        self.network.dead_listeners.clear()
        self._send_due()

    def may_fail(self) -> None:
        """From now on, allow loads to bring fewer tokens than the connector promised."""
        self._faults = True
        self.decode.request_events.may_fail.add("")
        self.prefill.request_events.may_fail.add("")

    def time_passes(self, seconds: float) -> None:
        """Let `seconds` seconds pass while both engines make no steps. Leases may expire."""
        self.may_fail()
        self.network.time_passes()
        self.seconds += seconds
        self._counts["pauses"] += 1

    def fail(self, what: str, how_many: int = 1) -> None:
        """Let the next `how_many` operations of kind `what` fail. The kinds are the keys of `PairNetwork.failing`."""
        self.may_fail()
        self.network.failing[what] += how_many

    def faults_end(self) -> None:
        """End all faults. After this call, a failed load is a violation."""
        self._faults = False
        self.network.failing.update(dict.fromkeys(self.network.failing, 0))
        self.malformed.clear()
        for engine in self.engines:
            engine.request_events.may_fail.discard("")

    def handshakes_take(self, steps: int) -> None:
        self.network.handshake_steps = steps

    def writers_take(self, steps: int) -> None:
        """Set how many steps prefill's writer thread waits after its wake-up before it writes KV (push mode)."""
        self.network.writers_take = steps

    def restart(self, name: str, blocks: int) -> None:
        """Restart an engine with this number of blocks. The requests of the old engine are lost."""
        self._counts["restarts"] += 1
        old = self.engine(name)
        old.connector.close()
        self.gone.append(old)
        self.may_fail()
        setattr(self, name, self._start(name, blocks))
        if name == "decode":
            self.sent.clear()  # a decode request that is sent again would read freed blocks of prefill (KVF340)

    def on(self, name: str, step: str, *arguments: Any) -> None:
        """Call the method `step` of one engine or of its connector."""
        self.engine(name).do(step, *arguments)

    def free_blocks(self) -> None:
        for engine in self.engines:
            engine.free_blocks()

    def budget(self, tokens: int) -> None:
        for engine in self.engines:
            engine.budget(tokens)

    def run(self, steps: int = 1000) -> None:
        """Make at most `steps` steps. Stop if no work is left, or if nothing changes during the longest timeout."""
        idle, waited = 0, None
        for _ in range(steps):
            if not self._busy():
                return
            before = self._state()
            if idle > 64:  # steps without a change
                if before == waited:
                    return
                idle, waited = 0, before
                self.time_passes(self.longest() + 1.0)
            self.step()
            idle = 0 if self.network.busy or self._state() != before or self._leases_end_soon() else idle + 1

    def _leases_end_soon(self) -> bool:
        """Return True if a lease holds blocks and lasts at most 30 s. Then `run` makes steps until the lease ends."""
        seconds = self.options.extra.get("kv_lease_duration", getattr(self.network, "timeout", 30))
        return seconds <= 30 and any(each.connector.leases for each in self.engines)

    def _busy(self) -> bool:
        schedulers = [engine.scheduler for engine in self.engines]
        work = any(each.has_unfinished_requests() or each.has_requests() for each in schedulers)
        return work or bool(self.waiting or self.network.busy)

    def longest(self) -> float:
        """Return the duration of the longest lease or timeout, in seconds."""
        extra = self.options.extra
        longest = max(extra.get("kv_lease_duration", 30), extra.get("decoder_kv_blocks_ttl", 480))
        return float(max(longest, getattr(self.network, "longest", 0)))

    def _state(self) -> list[Any]:
        counts = [each.counts[name] for each in self.engines for name in ("finished", "loaded_tokens")]
        # count generated tokens, because a request that is preempted again and again computes tokens without progress
        generated = [sum(r.num_output_tokens for r in each.requests.values()) for each in self.engines]
        return [*counts, *generated, *(len(each.scheduler.requests) for each in self.engines)]

    def expect_all_ended(self) -> bool:
        """Check that all requests have ended and no state outlives the leases. The caller makes steps first (`run`)."""
        for engine in self.engines:
            if engine.scheduler.has_unfinished_requests():
                engine.request_events.never_end()
                return False
        for _ in range(2):  # the second pass handles messages that came during the first pass
            self.time_passes(self.longest() + 1.0)
            slowest = self.network.delay + self.options.rank_delay
            for _ in range(4 + 4 * slowest + self.network.writers_take):
                self.tick()
                for engine in self.engines:
                    engine.iterate()
        for engine in self.engines:
            events, whose = engine.request_events, f"the {engine.name} engine"
            held = engine.options.num_blocks - 1 - engine.free()
            if held:
                message = f"{held} blocks are held, although all requests of {whose} have ended"
                events.violated(rules.BLOCKS_HELD, "", message)
            for request in sorted(engine.connector.kept_of_peer()):
                events.violated(rules.KEPT_OF_PEER, request, f"{whose} keeps state of the other engine's request")
            events.leaked()
        return True

    # ------------------------------------------------------------------ the router

    @property
    def waiting(self) -> set[str]:
        """The names of the requests that the router has not sent to decode yet."""
        return {each[1] for each in self._to_send}

    def ask(
        self, name: str, prompt: list[int], max_tokens: int = 1, prefill_tokens: int = 1, at_once: bool = False
    ) -> None:
        """Send a new request. prefill_tokens: tokens that prefill generates. at_once: do not wait for prefill."""
        self.asked[name] = _Asked(prompt, max_tokens, at_once)
        self._admit(self.prefill, self._id(name), prompt, prefill_tokens, self.prefill.connector.for_prefill(name))
        if at_once:
            self._counts["at_once"] += 1
            self._to_send.append((self.network.now, name, self.prefill.connector.for_decode(name, None)))

    def ask_decode(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        self._admit(self.decode, f"{name}-{2:08x}", prompt, max_tokens, None)

    def ask_again(self, name: str) -> None:
        """Abort a request in both engines, and send it again as a new request."""
        self.abort(name)
        asked = self.asked[name]
        self._counts["asked_again"] += 1
        self.ask(name, asked.prompt, asked.max_tokens, at_once=asked.at_once)

    def send_again(self, name: str) -> None:
        """Send a decode request again, as a router does if it gets no answer."""
        params = self.sent.get(name)
        if params is not None:
            self._counts["sent_again"] += 1
            asked = self.asked[name]
            self._admit(self.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params))

    def ends_at_once(self, name: str, prompt: list[int]) -> None:
        """Make the first generated token of this request its stop token. Call `ends_at_once` before `ask`."""
        self._stops[name] = continued(prompt, 1)[-1]

    def router_takes(self, steps: int) -> None:
        """Set how many steps the router waits between prefill's output and the decode request."""
        self._takes = steps

    def malform(self, what: str) -> None:
        """Put this fault (a key of MALFORMED) into the parameters of the next decode request."""
        self.malformed.append(what)

    def answered(self, engine: PairEngine, output: Any) -> None:
        if engine.connector.keeps(output.request_id):
            self.add(Leased(output.request_id, None))
        name = output.request_id.rpartition("-")[0]
        params = output.kv_transfer_params
        aborted = "abort" in str(output.finish_reason).lower()
        if engine is not self.prefill or name not in self.asked or aborted:
            return
        if params is not None:
            self._counts["leases"] += engine.connector.keeps(output.request_id)
            self._counts["stored_tokens"] += params.get("remote_num_tokens", 0)
        if not self.asked[name].at_once:
            due = self.network.now + self._takes
            self._to_send.append((due, name, engine.connector.for_decode(name, params)))

    def _send_due(self) -> None:
        now = self.network.now
        due = [each for each in self._to_send if each[0] <= now]
        self._to_send = [each for each in self._to_send if each[0] > now]
        for _, name, params in due:
            asked = self.asked[name]
            if params and self.malformed:
                params = MALFORMED[self.malformed.pop(0)](params)
                self._counts["malformed"] += 1
                self.may_fail()
            elif params:
                self.sent[name] = params
            self._admit(self.decode, self._id(name), asked.prompt, asked.max_tokens, dict(params or {}))

    def _id(self, name: str) -> str:
        self._ids[name] += 1
        return f"{name}-{self._ids[name]:08x}"

    def _admit(self, engine: PairEngine, name: str, prompt: list[int], most: int, params: Params | None) -> None:
        if engine.is_free(name):
            sampling: dict[str, Any] = {"extra_args": {"kv_transfer_params": params}} if params else {}
            of_client = name.rpartition("-")[0]
            if of_client in self._stops:
                sampling["stop_token_ids"] = [self._stops[of_client]]
            # each engine gets its own copy, because vLLM shortens prefill's prompt (`_truncate_request_for_prefill`)
            engine.do("admit", name, list(prompt), most, sampling=sampling)


class Neighbour(LabEngine):
    """One of two engines that share LMCache's cache."""

    def __init__(self, options: Options, name: str, caches: list[Cache] | None = None) -> None:
        self.name = name
        with running(name):
            super().__init__(options, caches)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this context, the clock shows this engine's time, and new LMCache clients use this engine's server."""
        clock.now = lambda: self.request_events.seconds
        if isinstance(self.connector, MP):
            self.connector._replace(import_module(ADAPTER))
        with running(self.name):
            yield


class Neighbours(Engines):
    """Two engines with the same options. Each engine can load chunks that the other engine has stored."""

    engines: tuple[Neighbour, Neighbour]

    def __init__(self, options: Options) -> None:
        first = Neighbour(options, "first")
        self.engines = first, Neighbour(options, "second", first.caches)

    def of(self, number: int, step: tuple[Any, ...]) -> tuple[Neighbour, ...]:
        """Return the engines that play `step`: both, none, or the engine that `number` or the request id selects."""
        kind = step[0]
        if kind in ("step", "new_weights"):
            # The lab skips the step new_weights, because the weights of both engines must change at the same time.
            return self.engines if kind == "step" else ()
        if kind in ("admit", "configured", "session"):
            number = int(step[1].removeprefix("r"))
        if kind == "evict" and step[2]:
            for engine in self.engines:  # the eviction may delete promised chunks of both engines
                engine.request_events.may_fail.add("")
        return (self.engines[number % 2],)
