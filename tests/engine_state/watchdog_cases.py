"""What the watchdog reports of the lab's engines, and of what it must not take for a hang: run in a fork."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvfix
import kvfix.clock
from kvfix.connector_events import watchdog
from kvfix.session import session
from kvfix_tools import recording
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.engine_state import wedged

#: Seconds that the clock of these cases advances with each step: twelve in the limit.
STEP = 5.0
#: vLLM's EngineCore, as the stack of a main thread shows it, around a call.
_CORE: dict[str, Any] = {}
exec(compile("def step(call):\n    return call()", "/vllm/v1/engine/core.py", "exec"), _CORE)


def prepare() -> None:
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp()
    os.environ[watchdog.SECONDS] = "0"  # no thread
    kvfix.apply("observe")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(act: Callable[[], Any], steps: int, inside: Callable[[Any], Any] = lambda call: call()) -> float:
    """Seconds after which the watchdog reports, when `act` is done again and again; 0: never."""
    clock = Clock()
    dog = watchdog.Watchdog(60.0, clock)
    for _ in range(steps):
        act()
        clock.now += STEP
        if inside(dog.is_due):
            return clock.now
    return 0.0


def wedge(name: str) -> dict[str, Any]:
    """{"seconds", "line", "kinds", "requests"}: what a thread reports of an engine that goes on with empty steps."""
    prepare()
    engine = getattr(wedged, name)()
    seconds = due(engine.step, 40)
    dog = watchdog.Watchdog(0.5)
    session.reported.clear()
    thread = watchdog.threading.Thread(target=dog.run)
    thread.start()
    until = time.monotonic() + 300
    while thread.is_alive() and time.monotonic() < until:  # the main thread does what EngineCore's does
        engine.step()
    dog.stopped.set()
    (line,) = [text for text in session.reported if "State, stacks and events" in text]
    file = recording.read(Path(line.rpartition(": ")[2]))
    (state,) = file.lines["state"]
    (stacks,) = file.lines["stacks"]
    return {
        "seconds": seconds, "line": line, "reason": file.head["reason"], "events": len(file.entries),
        "requests": [row["id"] for row in state["scheduler"]["requests"]], "stacks": stacks["text"],
    }  # fmt: skip


def quiet() -> dict[str, float]:
    """{what is no hang: seconds until it was reported}: all 0."""
    prepare()
    found = {}
    engine = wedged._engine(Options(connector="mp", delay=3, num_blocks=48, chunk_size=64))
    found["idle"] = due(engine.step, 40)

    def load() -> None:
        if not engine.scheduler.requests:
            for number in range(3):
                engine.admit(f"r{engine.steps}-{number}", prompt(190, seed=number), max_tokens=30)
        engine.step()

    found["load"] = due(load, 400)
    engine.admit("long", prompt(200, seed=9), max_tokens=4)
    engine.step()
    found["a step at the workers"] = due(lambda: None, 40, _CORE["step"])
    found["not at the workers"] = due(lambda: None, 40)
    return found


def paused() -> float:
    prepare()
    engine = wedged.locked_out_engine()
    engine.pause(everything=True)
    return due(engine.step, 40)


def in_hook(hook: str, times: int, requests: int = 1) -> list[Any]:
    """Seconds after which a hook is reported that looks at the clock so often before it comes back, and what stands."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    original, found = getattr(LMCacheMPConnector, hook), []
    dog = watchdog.Watchdog(60.0, clock := Clock())

    def slow(self: Any, *args: Any) -> Any:
        for _ in range(times):
            clock.now += STEP
            if (standing := dog.is_due()) and not found:
                found.extend([clock.now, standing[1] if standing[0] == "call" else standing[0]])
        return original(self, *args)

    setattr(LMCacheMPConnector, hook, slow)
    prepare()  # kvfix's wrapper is around the slow one
    engine = wedged.empty_engine()
    vars(kvfix.clock)["now"] = clock  # a call is known by its start
    for number in range(requests):
        engine.admit(f"r{number}", prompt(200, seed=number), max_tokens=40)
    engine.step(40)
    return found


def start_of_lmcache() -> list[Any]:
    """LMCache does not come back from its start."""
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
