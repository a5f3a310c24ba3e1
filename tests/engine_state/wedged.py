"""Make engines of the lab that hang or work. `python -m tests.engine_state.wedged NAME` runs one engine in a loop."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kvfix
from kvfix import engine_state
from kvfix.engine_state import lmcache_readers
from kvfix.engine_state import scheduler as needs
from kvfix.session import session
from kvfix_tools.lab import runner
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.steps import prompt
from tests import late

MP = Options(connector="mp", delay=3, block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256)


def look(engine: Any, full: bool = False) -> dict[str, Any]:
    state = engine_state.collect(full, scheduler=engine.scheduler, workers=[engine.connector.workers[0].in_worker])
    assert not state["unread"], state["unread"]
    assert not [each for each in state["connectors"] if "unread" in each], state["connectors"]
    return dict(json.loads(json.dumps(state)))


def twice(name: str, *arguments: Any) -> list[dict[str, Any]]:
    """Make an engine with the function `name`. Return two looks at the engine, twelve steps apart."""
    engine, full = globals()[name](*arguments), name == "locked_out_engine"
    first = look(engine, full)
    engine.step(12)
    return [first, look(engine, full)]


def _engine(options: Options) -> Any:
    engine = late.LabEngine(options)
    if "enable_async_loading" in options.lmcache:  # let kvfix's reader use the lab's time for lookups
        now: Any = SimpleNamespace(time=lambda: engine.connector.now, monotonic=time.monotonic)
        vars(lmcache_readers)["time"] = now
    return engine


def empty_engine() -> Any:
    return _engine(MP)


def locked_out_engine() -> Any:
    """Return an engine with the bug of KVF208: "low" is loaded, but waits behind "r", which needs too many blocks."""
    return find("loaded-requests-lock-out").played()


def arrivals() -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return each request's arrival time in seconds since 1970, and the requests' rows in a look."""
    engine = locked_out_engine()
    rows = look(engine)["scheduler"]["requests"]
    return {name: request.arrival_time for name, request in engine.requests.items()}, rows


def busy_engine() -> Any:
    """Return an engine in which one request generates, one loads, and one waits."""
    engine = _engine(MP)
    engine.admit("running", prompt(100, seed=1), max_tokens=40)
    engine.step(6)
    begin_to_load(engine, "loading")
    engine.admit("waiting", prompt(300, seed=2), max_tokens=4)
    return engine


def engine_without_load() -> Any:
    """Return an engine whose worker has lost a load. No transfer is in flight, and the worker reports no load."""
    engine = silent_server()
    engine.connector.workers[0].adapter.retrieve_futures.clear()
    return engine


def silent_server() -> Any:
    engine = begun_to_load()
    engine.connector.server.lose_loads(0, set())
    return engine


def begun_to_load() -> Any:
    return begin_to_load(_engine(MP), "r")


def begin_to_load(engine: Any, name: str) -> Any:
    engine.do("stored_elsewhere", prompt(192))
    engine.admit(name, prompt(200), max_tokens=4)
    while not engine.connector.workers[0].adapter.retrieve_futures:
        engine.step()
    return engine


def lookup_without_answer(connector: str) -> Any:
    if connector == "mp":
        engine = _engine(MP)
        engine.admit("r", prompt(200), max_tokens=4)
        engine.step()
        engine.connector.server._later.clear()
        return engine
    engine = _engine(Options(chunk_size=64, lmcache={"enable_async_loading": True}))
    engine.do("lookups_fail", 1)
    engine.admit("r", prompt(200), max_tokens=4)
    engine.step(2)
    return engine


def healthy(connector: str, steps: int) -> list[dict[str, Any]]:
    """Play a schedule without faults, with few blocks and repeated prompts. Return a look after each step."""
    lmcache: dict[str, Any] = {"enable_async_loading": True} if connector == "v1-async" else {}
    kind = "mp" if connector == "mp" else "v1"
    engine = _engine(Options(connector=kind, delay=3, num_blocks=48, chunk_size=64, lmcache=lmcache))
    if connector == "v1-async":
        engine.do("slow_lookups", 2)
    looks = []
    for at in range(steps):
        if at % 6 == 0:
            number = at // 6
            engine.admit(f"r{number}", prompt(150 + 40 * (number % 5), seed=number % 4), max_tokens=60)
        engine.step()
        looks.append(look(engine))
    return looks


def planted_fault() -> dict[str, Any]:
    """Return the state of a scheduler that lacks an attribute. `collect` must raise no error for unknown releases."""
    engine = _engine(MP)
    engine.admit("r", prompt(200), max_tokens=4)
    engine.step()
    del engine.scheduler.finished_recving_kv_req_ids
    return engine_state.collect(scheduler=engine.scheduler, workers=[engine.connector.workers[0].in_worker])


def with_recorder() -> dict[str, Any]:
    kvfix.apply("observe")
    engine = begun_to_load()
    assert session.connectors
    return look(engine)


def asked_and_needed(windows: tuple[int, ...], reserve: bool) -> list[tuple[int | None, int]]:
    """Return pairs (kvfix's count, vLLM's count) of the blocks that a waiting request needs while no request runs."""
    engine = _engine(replace(MP, delay=2, num_blocks=72, windows=windows, max_num_batched_tokens=128))
    scheduler, found = engine.scheduler, []
    scheduler.scheduler_reserve_full_isl = reserve
    manager = scheduler.kv_cache_manager
    allocate, count = manager.allocate_slots, manager.coordinator.get_num_blocks_to_allocate
    counts: list[int] = []

    def counted(*arguments: Any, **named: Any) -> int:
        counts.append(count(*arguments, **named))
        return counts[-1]

    def allocated(request: Any, tokens: int, **named: Any) -> Any:
        waits = "reserved_blocks" in named and not scheduler.running
        ours = None
        if waits:
            promised, reserved = named["num_external_computed_tokens"], needs._reserved(scheduler)
            ours = needs._needed(scheduler, request, promised, named["delay_cache_blocks"], reserved)
        counts.clear()
        done = allocate(request, tokens, **named)
        if waits:
            whole, *step = counts if reserve else [0, *counts]
            assert done is None or step
            if step:  # `step` is empty if vLLM has found the whole request too large
                found.append((ours, max(whole, step[0] + named["reserved_blocks"])))
        return done

    manager.allocate_slots, manager.coordinator.get_num_blocks_to_allocate = allocated, counted
    for number in range(24):
        engine.admit(f"r{number}", prompt(100 + 70 * (number % 5), seed=number % 4), max_tokens=20 + 9 * (number % 3))
        engine.step(5 if number % 3 else 60)
    return found


class EngineCore:  # a stand-in, because vLLM's EngineCore needs a model. A step takes at least 0.01 s
    model_executor = None

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.scheduler = lab.scheduler

    def run_busy_loop(self, busy: bool) -> None:
        number = 0
        while True:
            if busy and len(self.scheduler.requests) < 4:
                number += 1
                self._lab.admit(f"busy{number}", [number % 400 + 1] * 90, max_tokens=50)
            self._lab.step()
            if number < 3:
                print("runs", flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    runner.prepare(None)
    from vllm.distributed.kv_transfer import kv_transfer_state

    lab = globals()[sys.argv[1]]()
    kv_transfer_state._KV_CONNECTOR_AGENT = lab.connector.workers[0].in_worker
    EngineCore(lab).run_busy_loop(busy=sys.argv[1] == "empty_engine")
