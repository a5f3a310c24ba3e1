"""Two lab engines, one for prefill and one for decode, with a router between them, on one network and one clock.

The router does what vLLM's toy proxy does: it has the prefill engine compute the prompt (`do_remote_decode`, one
token), takes `kv_transfer_params` out of what that answers, and sends the request with them to the decode engine. An
engine without requests makes no step, as EngineCore does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfix import clock
from kvfix.ledger import Finding, Ledger
from kvfix.ledger.events import Event, Leased
from kvfix_tools.lab import rules
from kvfix_tools.lab.lab_engine import STEP, LabEngine
from kvfix_tools.lab.memory import Slots
from kvfix_tools.lab.nixl import NixlSide
from kvfix_tools.lab.nixl_agent import Network
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt

#: What the router asks the prefill engine with.
_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
#: What may be wrong with the parameters of a request for decode: they come from the router, or whoever sent it.
MALFORMED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no_blocks": lambda params: {**params, "remote_block_ids": []},
    "no_host": lambda params: {key: value for key, value in params.items() if key != "remote_host"},
    "no_request": lambda params: {key: value for key, value in params.items() if key != "remote_request_id"},
    "no_tp_size": lambda params: {key: value for key, value in params.items() if key != "tp_size"},
    "fewer_blocks": lambda params: {**params, "remote_block_ids": [params["remote_block_ids"][0][:-1]]},
    "more_blocks": lambda params: {**params, "remote_block_ids": [[*params["remote_block_ids"][0], 1]]},
    "flat_blocks": lambda params: {**params, "remote_block_ids": list(params["remote_block_ids"][0])},
    "odd_blocks": lambda params: {**params, "remote_block_ids": [["x"] * len(params["remote_block_ids"][0])]},
    "far_blocks": lambda params: {**params, "remote_block_ids": [[1 << 20] * len(params["remote_block_ids"][0])]},
    "other_engine": lambda params: {**params, "remote_engine_id": "other"},
    "other_port": lambda params: {**params, "remote_port": 1},
    "decode_too": lambda params: {**params, "do_remote_decode": True, "do_remote_prefill": False},
    "more_ranks": lambda params: {**params, "pp_size": 2},
    "odd_engine": lambda params: {**params, "remote_engine_id": ["other"]},
    "alone": lambda params: {**params, "do_remote_prefill": False},
    "nothing": lambda params: {},
}
#: Steps without anything after which the world stands still.
_IDLE = 64


class _Asked(NamedTuple):
    """What the client of a request has asked for."""

    prompt: list[int]
    max_tokens: int


class PairEngine(LabEngine):
    """One of the two. name: of its host."""

    def __init__(self, options: Options, pair: Pair, name: str, engine_id: str) -> None:
        self.name = name
        self._pair = pair
        self._engine_id = engine_id
        super().__init__(options)

    def _connected(self, options: Options, memories: list[Slots]) -> Any:
        side = NixlSide(options, memories, self._pair.network, self.name, self._engine_id)
        side.workers[0].add_to_pair = self._pair.add
        return side

    def answered(self, outputs: Any) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.finish_reason is not None:
                    self._pair.answered(self, output)

    def iterate(self) -> None:
        self.request_events.seconds = self._pair.seconds - STEP
        super().iterate()


class Pair:
    """A world of two engines: what `fuzz.play` and a scenario ask of a LabEngine, it answers for both."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.network = Network(options.delay)
        self.seconds = 0.0
        self._starts = itertools.count(1)
        self._gone: list[PairEngine] = []
        self._asked: dict[str, _Asked] = {}
        #: Steps that the router takes, and what it has to send: (step, request, parameters).
        self._router_steps = 0
        self._to_send: list[tuple[int, str, dict[str, Any] | None]] = []
        #: The last parameters of each request, and what is wrong with the next ones.
        self._params: dict[str, dict[str, Any]] = {}
        self._malformed: list[str] = []
        self.of_router: Counter[str] = Counter()
        self._findings: list[Finding] = []
        self._ledger = Ledger()
        self._log: list[tuple[int, Event]] = []
        #: Whether loads may come short.
        self._faults = False
        self.prefill = self._start("prefill", options.num_blocks)
        self.decode = self._start("decode", options.decode_blocks or options.num_blocks)

    def _start(self, name: str, blocks: int) -> PairEngine:
        role = "kv_both" if self.options.extra.get("bidirectional_kv_xfer") else f"kv_{_ROLES[name]}"
        options = dataclasses.replace(self.options, num_blocks=blocks, kv_role=role)
        engine = PairEngine(options, self, name, f"{name}-{next(self._starts)}")
        clock.now = lambda: self.seconds
        if self._faults:
            engine.request_events.may_fail.add("")
        return engine

    @property
    def engines(self) -> tuple[PairEngine, PairEngine]:
        return self.prefill, self.decode

    def engine(self, name: str) -> PairEngine:
        return self.prefill if name == "prefill" else self.decode

    # ------------------------------------------------------------------ what a run has

    @property
    def steps(self) -> int:
        return sum(engine.steps for engine in (*self._gone, *self.engines))

    @property
    def findings(self) -> list[Finding]:
        return [found for engine in (*self._gone, *self.engines) for found in engine.findings] + self._findings

    @property
    def log(self) -> list[tuple[int, Event]]:
        return [entry for engine in (*self._gone, *self.engines) for entry in engine.log] + self._log

    @property
    def requests(self) -> dict[str, Any]:
        return {**self.prefill.requests, **self.decode.requests}

    @property
    def counts(self) -> Counter[str]:
        """Of both engines, those that were restarted too."""
        counts = Counter(self.of_router)
        for engine in (*self._gone, *self.engines):
            counts.update(engine.counts)
        return counts

    def close(self) -> None:
        """Both engines end."""
        for engine in self.engines:
            engine.connector.close()

    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        """The step of this name, a method below."""
        getattr(self, step)(*arguments, **keywords)

    # ------------------------------------------------------------------ the router

    def ask(self, name: str, prompt: list[int], max_tokens: int = 1, prefill_tokens: int = 1) -> None:
        """A client's request arrives at the router. prefill_tokens: what it lets the prefill engine generate."""
        self._asked[name] = _Asked(prompt, max_tokens)
        self._admit(self.prefill, f"{name}-{1:08x}", prompt, prefill_tokens, dict(_PREFILL))

    def move(self, step: tuple[Any, ...]) -> None:
        """A drawn step (pair_schedule.py); one that does not fit does nothing."""
        kind, *rest = step
        if kind in ("ask", "ask_decode"):
            name, seed, tokens, max_tokens, *more = rest
            self.do(kind, name, prompt(tokens, seed), max_tokens, *more)
        elif kind in ("abort", "send_again"):
            names = list(self._params) if kind == "send_again" else self._open()
            if names:
                self.do(kind, names[rest[0] % len(names)])
        elif kind == "preempt":
            engine = self.engine(rest[0])
            running = [each.request_id for each in engine.scheduler.running]
            if running:
                engine.preempt(running[rest[1] % len(running)])
        elif kind in ("take_blocks", "free_blocks", "budget"):
            self.on(rest[0], kind, *rest[1:])
        elif kind == "reset":
            self.on(rest[0], "reset_prefix_cache")
        else:
            self.do(kind, *rest)

    def _open(self) -> list[str]:
        """Requests of clients that wait for an answer."""
        waiting = {each[1] for each in self._to_send}
        for engine in self.engines:
            waiting |= {name.rpartition("-")[0] for name, each in engine.requests.items() if not each.is_finished()}
        return sorted(waiting)

    def ask_decode(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """A request goes to the decode engine alone."""
        self._admit(self.decode, f"{name}-{2:08x}", prompt, max_tokens, None)

    def send_again(self, name: str) -> None:
        """The router sends a request to the decode engine once more, as it does if it has got no answer."""
        params = self._params.get(name)
        if params is not None:
            self.of_router["sent_again"] += 1
            asked = self._asked[name]
            self._admit(self.decode, f"{name}-{3:08x}", asked.prompt, asked.max_tokens, dict(params))

    def router_takes(self, steps: int) -> None:
        """From now on the router takes so many steps for an answer."""
        self._router_steps = steps

    def malform(self, what: str) -> None:
        """The parameters of the next request for decode are wrong in this way (MALFORMED)."""
        self._malformed.append(what)

    def add(self, event: Event) -> None:
        """An event of a lease: what is wrong with it is a finding."""
        self._log.append((self.network.now, event))
        self._findings += [found for found in self._ledger.feed(event) if found.verdict == "violated"]

    def answered(self, engine: PairEngine, output: Any) -> None:
        name = output.request_id.rpartition("-")[0]
        if output.request_id in engine.connector.scheduler_side._reqs_need_send:
            self.add(Leased(output.request_id, None))
        if engine is self.prefill and name in self._asked and "abort" not in str(output.finish_reason).lower():
            if output.kv_transfer_params is not None:
                self.of_router["leases"] += any(output.kv_transfer_params["remote_block_ids"])
                self.of_router["stored_tokens"] += output.kv_transfer_params["remote_num_tokens"]
            due = self.network.now + self._router_steps
            self._to_send.append((due, name, output.kv_transfer_params))

    def _send(self) -> None:
        due = [each for each in self._to_send if each[0] <= self.network.now]
        self._to_send = [each for each in self._to_send if each[0] > self.network.now]
        for _, name, params in due:
            asked = self._asked[name]
            if params and self._malformed:
                what = self._malformed.pop(0)
                params = MALFORMED[what](params)
                self.of_router["malformed"] += 1
                self._may_fail()
            elif params:
                self._params[name] = params
            self._admit(self.decode, f"{name}-{2:08x}", asked.prompt, asked.max_tokens, dict(params or {}))

    def _admit(self, engine: PairEngine, name: str, prompt: list[int], most: int, params: Any) -> None:
        if engine.is_free(name):
            sampling = {"extra_args": {"kv_transfer_params": params}} if params else {}
            engine.admit(name, prompt, most, sampling=sampling)

    # ------------------------------------------------------------------ steps

    def step(self, times: int = 1) -> None:
        """So many steps of both engines."""
        for _ in range(times):
            self._tick()
            for engine in self.engines:
                self._iterate(engine)

    def step_alone(self, name: str, times: int = 1) -> None:
        """So many steps of one engine, while the other one hangs: a lease may end."""
        self._may_fail()
        for _ in range(times):
            self._tick()
            self._iterate(self.engine(name))

    def _tick(self) -> None:
        self.seconds += STEP
        self.network.tick()
        for address in self.network.dead_listeners:
            engine = self.engine(address.partition(":")[0])
            engine.request_events.violated(
                rules.THREAD_DIED, "", f"the {engine.name} engine answers no handshake any more"
            )
        self.network.dead_listeners.clear()
        self._send()

    def _iterate(self, engine: PairEngine) -> None:
        if engine.scheduler.has_requests():
            engine.iterate()

    def _may_fail(self) -> None:
        """Loads may come short from now on."""
        self._faults = True
        self.decode.request_events.may_fail.add("")
        self.prefill.request_events.may_fail.add("")

    def time_passes(self, seconds: float) -> None:
        """Nothing happens for so long: both engines hang, and a lease may end."""
        self._may_fail()
        self.seconds += seconds
        self.of_router["pauses"] += 1

    def fail(self, what: str, how_many: int = 1) -> None:
        """So many of the next transfers, or handshakes, fail."""
        self._may_fail()
        self.network.failing[what] += how_many

    def handshakes_take(self, steps: int) -> None:
        """From now on a handshake takes so many steps."""
        self.network.handshake_steps = steps

    def restart(self, name: str, blocks: int) -> None:
        """An engine ends, with its requests, and starts anew with so many blocks."""
        self.of_router["restarts"] += 1
        old = self.engine(name)
        old.connector.close()
        self._gone.append(old)
        self._may_fail()
        if name == "prefill":
            self.prefill = self._start(name, blocks)
        else:
            self.decode = self._start(name, blocks)
            self._params.clear()  # a router that sends a request to two decode engines reads what is freed: KVF340

    def on(self, name: str, step: str, *arguments: Any) -> None:
        """A step of one of the engines."""
        self.engine(name).do(step, *arguments)

    def abort(self, name: str) -> None:
        """The client of this request is gone, and the router tells both engines."""
        self._to_send = [each for each in self._to_send if each[1] != name]
        for engine in self.engines:
            for request in [each for each in engine.requests if each.rpartition("-")[0] == name]:
                if not engine.requests[request].is_finished():
                    engine.abort(request)

    def free_blocks(self) -> None:
        for engine in self.engines:
            engine.free_blocks()

    def budget(self, tokens: int) -> None:
        for engine in self.engines:
            engine.budget(tokens)

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is to be done, at most so often; or until nothing has happened for a while."""
        idle = 0
        for _ in range(steps):
            if not self._busy() or idle > _IDLE:
                return
            before = self._state()
            self.step()
            moves = self.network.busy or self._state() != before or any(each.connector.leases for each in self.engines)
            idle = 0 if moves else idle + 1

    def _busy(self) -> bool:
        work = any(
            engine.scheduler.has_unfinished_requests() or engine.scheduler.has_requests() for engine in self.engines
        )
        return bool(work or self._to_send or self.network.busy)

    def _state(self) -> list[Any]:
        return [
            (
                engine.counts["finished"],
                len(engine.scheduler.requests),
                sum(r.num_computed_tokens for r in engine.requests.values()),
            )
            for engine in self.engines
        ]

    def expect_all_ended(self) -> bool:
        """All is free, many steps were made: every request has ended; once all leases are over nothing is kept."""
        for engine in self.engines:
            if engine.scheduler.has_unfinished_requests():
                engine.request_events.never_end()
                return False
        self.time_passes(
            max(self.options.extra.get("kv_lease_duration", 30), self.options.extra.get("decoder_kv_blocks_ttl", 480))
            + 1.0
        )
        for _ in range(4 + 4 * self.network.delay):
            self._tick()
            for engine in self.engines:
                engine.iterate()
        for engine in self.engines:
            held = engine.options.num_blocks - 1 - engine.free()
            if held:
                engine.request_events.violated(
                    rules.BLOCKS_HELD,
                    "",
                    f"{held} blocks are held, and all requests of the {engine.name} engine have ended",
                )
            engine.request_events.leaked()
        return True


_ROLES = {"prefill": "producer", "decode": "consumer"}
