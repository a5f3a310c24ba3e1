"""The watchdog reports each standstill once, and never reports an engine that works, idles or computes."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfix
import kvfix.clock
from kvfix.connector_events import watchdog
from kvfix.session import session
from kvfix_tools import recording
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers
from tests.engine_state import wedged

STEP = 5.0  # seconds by which each step advances the clock. Twelve steps reach the watchdog's limit of 60 s
#: `step(call)` runs `call`. The watchdog recognizes a step of EngineCore by the file name that `compile` gets here.
_CORE: dict[str, Any] = {}
exec(compile("def step(call):\n    return call()", "/vllm/v1/engine/core.py", "exec"), _CORE)


def prepare() -> None:
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp()
    os.environ[watchdog.SECONDS] = "0"  # 0 means: start no watchdog thread
    kvfix.apply("observe")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def due(act: Callable[[], Any], steps: int, inside: Callable[[Any], Any] = lambda call: call()) -> float:
    """Call `act` at most `steps` times. Return the seconds until the watchdog's report, or 0 if no report comes."""
    clock = Clock()
    dog = watchdog.Watchdog(60.0, clock)
    for _ in range(steps):
        act()
        clock.now += STEP
        if inside(dog.is_due):
            return clock.now
    return 0.0


def logged_reports() -> list[str]:
    reports: list[str] = []
    vars(watchdog.engine_log)["warning"] = lambda line: reports.extend([line] * ("State, stacks and events" in line))
    return reports


def wedge(name: str) -> dict[str, Any]:
    """Run the watchdog's thread on an engine that makes empty steps. Return the parts of the watchdog's report."""
    prepare()
    engine = getattr(wedged, name)()
    watchdog._TRIES = watchdog._STANDS = 10_000  # on a busy host, a step often disturbs a read, and `_look` reads again
    dog, reports, stepped = watchdog.Watchdog(0.5), logged_reports(), watchdog.threading.Event()

    def wait(_: float) -> bool:  # wait for five steps, because steps may be slow on a busy host
        for _step in range(0 if reports else 5):
            stepped.clear()
            stepped.wait()
        return bool(reports)

    vars(dog.stopped)["wait"] = wait
    thread = watchdog.threading.Thread(target=dog.run, daemon=True)
    thread.start()
    while thread.is_alive() and engine.steps < 1_000_000:  # the main thread makes steps, as in EngineCore
        engine.step()
        stepped.set()
    (line,) = reports
    file = recording.read(Path(line.rpartition(": ")[2]))
    (state,), (stacks,) = file.lines["state"], file.lines["stacks"]
    return {
        "seconds": due(engine.step, 40), "line": line, "reason": file.head["reason"], "events": len(file.entries),
        "requests": [row["id"] for row in state["scheduler"]["requests"]], "stacks": stacks["text"],
    }  # fmt: skip


@answers([0.0, 0.0, 0.0, True, 0.0])
def test_engines_that_do_not_hang() -> list[float]:
    """Engines idle, work, wait in a step, wait outside steps, or pause. Only the wait outside steps is reported."""
    prepare()
    engine = wedged._engine(Options(connector="mp", delay=3, num_blocks=48, chunk_size=64))

    def load() -> None:
        if not engine.scheduler.requests:
            for number in range(3):
                engine.admit(f"r{engine.steps}-{number}", prompt(190, seed=number), max_tokens=30)
        engine.step()

    found = [due(engine.step, 40), due(load, 400)]
    engine.admit("long", prompt(200, seed=9), max_tokens=4)
    engine.step()
    found += [due(lambda: None, 40, _CORE["step"]), due(lambda: None, 40) > 0]
    engine = wedged.locked_out_engine()
    engine.pause(everything=True)
    return [*found, due(engine.step, 40)]


@answers([0.0, 70.0])  # the look at 5 s still counts earlier steps as progress, so the 60 s begin at 10 s
def test_a_decode_engine_that_waits_for_the_queue_of_prefill() -> list[float]:
    """Return the seconds until a report while the decode engine makes steps, and then while it makes no step."""
    prepare()
    pair = late.Pair(Options(connector="mooncake", block_size=16, num_blocks=40, max_num_batched_tokens=64))
    pair.ask_at_once("r", prompt(100), 5)
    while not any(each.status.name == "WAITING_FOR_REMOTE_KVS" for each in pair.decode.scheduler.requests.values()):
        pair.step_alone("decode")
    del session.connectors[vars(pair.prefill.scheduler)["_kvfix_watched"].number]
    return [due(lambda: pair.step_alone("decode"), 40), due(lambda: None, 40)]


@answers([1, 1, 1, 2])
def test_each_standstill_is_reported_once() -> list[int]:
    """Return the number of reports after 75 s and 150 s of a standstill, after progress, and after a new standstill."""
    prepare()
    engine = wedged.silent_server()
    dog, reports, found = watchdog.Watchdog(60.0, clock := Clock()), logged_reports(), []
    dog.stopped.wait = lambda seconds: False  # type: ignore[method-assign, assignment]

    def stand(steps: int) -> None:
        for _ in range(steps):
            engine.step()
            clock.now += STEP
            dog._look_once()
        found.append(len(reports))

    stand(15)
    stand(15)
    engine.admit("other", prompt(100, seed=1), max_tokens=8)
    while not engine.requests["other"].is_finished():
        stand(1)
    stand(15)
    return [found[0], found[1], found[-2], found[-1]]


@pytest.mark.parametrize(
    ("hook", "times", "requests", "answer"),
    [
        ("build_connector_meta", 20, 1, ["build_connector_meta of LMCacheMPConnector"]),
        ("build_connector_meta", 2, 1, []),
        # One step can call the hook for many requests, and LMCache in process can wait for seconds in each call.
        ("get_num_new_matched_tokens", 2, 20, ["requests"]),
        ("get_num_new_matched_tokens", 1, 2, []),
    ],
)
@answers(also="answer")
def test_a_hook_that_does_not_come_back(hook: str, times: int, requests: int) -> list[Any]:
    """The hook advances the clock `times` times before it returns. Return the reports."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    original, found = getattr(LMCacheMPConnector, hook), []
    dog = watchdog.Watchdog(60.0, clock := Clock())

    def slow(self: Any, *args: Any) -> Any:
        for _ in range(times):
            clock.now += STEP
            if (standing := dog.is_due()) and not found:
                found.append(standing[1] if standing[0] == "call" else standing[0])
        return original(self, *args)

    setattr(LMCacheMPConnector, hook, slow)
    prepare()  # kvfix wraps the slow hook
    engine = wedged.empty_engine()
    vars(kvfix.clock)["now"] = clock  # the watchdog recognizes a call by its start time
    for number in range(requests):
        engine.admit(f"r{number}", prompt(200, seed=number), max_tokens=40)
    engine.step(40)
    return found


@answers([60.0, "the start of LMCache (manager.py)"])
def test_a_start_that_hangs() -> list[Any]:
    prepare()
    dog = watchdog.Watchdog(60.0, clock := Clock())
    found: list[Any] = []
    names: dict[str, Any] = {"dog": dog, "clock": clock, "STEP": STEP, "found": found}
    code = (
        "class Manager:\n    def __init__(self):\n        while not found:\n"
        "            found.extend(dog.is_due()[1:2])\n            clock.now += 0 if found else STEP\n"
    )
    exec(compile(code, "/lmcache/v1/manager.py", "exec"), names)
    names["Manager"]()
    return [clock.now, *found]


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ("locked_out_engine", "KVD202 nothing-moves: 1 request is loaded and waits behind r, which needs 8 blocks; 4"),
        ("engine_without_load", "The cause is not known: read the state and the stacks of the engine."),
        ("silent_server", "The cause is not known: read the state and the stacks of the engine."),
    ],
)
def test_an_engine_that_stands_still(engine: str, verdict: str, once: Once) -> None:
    found = once(wedge, RELEASES / "0.5.6", engine)
    assert (found["seconds"], found["reason"]) == (65.0, "standstill")  # the first look is at 5 s, the limit is 60 s
    assert "no request has made progress for " in found["line"]
    assert verdict in found["line"]
    assert found["events"] > 0
    assert "r" in found["requests"]
    assert "watchdog.py" in found["stacks"]
    assert "in wedge" in found["stacks"]  # the stack of the main thread


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("5", 5.0), ("0", 0.0), ("-1", 0.0), ("soon", 60.0)])
def test_the_limit(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, watchdog.SECONDS, text)
    assert watchdog._limit() == seconds
