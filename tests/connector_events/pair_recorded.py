"""Make recorder files of the lab's two engines as if on two machines. Leases use the lab's time."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvfix
from tests.connector_events.split import on_node
from tests.lab.planted_in_pairs import leases_are_over_at_once  # noqa: F401  planted by its name

#: Seconds that the monotonic and the wall clock of an engine's machine are ahead.
CLOCKS = {"prefill": (0.0, 0.0), "decode": (5000.0, -3.0)}


def nothing(pair: Any) -> None:
    """No fault."""


def lose_notice(pair: Any) -> None:
    """Lose decode's notice that it has read the blocks of request b."""
    agent = pair.decode.connector.workers[0].adapter.nixl_wrapper
    make = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda *arguments, notif_msg: make(
        *arguments, notif_msg=b"" if notif_msg.startswith(b"b-") else notif_msg
    )


def lose_aborts(pair: Any) -> None:
    """Lose the notice of a request that ends before it is scheduled."""
    scheduler = pair.decode.connector.scheduler_side
    finished = scheduler.request_finished

    def request_finished(request: Any, blocks: Any) -> Any:
        answer = finished(request, blocks)
        scheduler._reqs_need_recv.pop(request.request_id, None)
        return answer

    scheduler.request_finished = request_finished


def recorded(fault: str, seconds: float = 0.0, connector: str = "nixl-pull") -> str:
    """Return the recorder file of a pair with this fault, after so many more seconds. A lease is 30 s."""
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    from kvfix import clock
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.engine.engine_core import STEP, EngineDied
    from kvfix_tools.lab.options import Options
    from kvfix_tools.lab.pair.pair import Pair
    from kvfix_tools.lab.steps import prompt

    with runner.quiet():
        # the reads of those whose leases are over at once are not to fail
        kvfix.apply("check", only=[])
        from kvfix.connector_events import dump, recorder

        now = SimpleNamespace(monotonic_ns=lambda: int(clock.now() * 1e9), time_ns=lambda: int(clock.now() * 1e9))
        recorder.time = dump.time = now  # type: ignore[attr-defined, assignment]
        lease = {"kv_lease_duration": 30}
        pair = Pair(Options(connector=connector, num_blocks=40, max_num_batched_tokens=64, extra=lease))
        globals()[fault](pair)
        with suppress(EngineDied):
            pair.ask("a", prompt(100), 5)
            pair.ask("b", prompt(150, seed=1), 5)
            pair.step(3)
            pair.ask("c", prompt(60, seed=2), 5)
            pair.step(12)
            pair.on("decode", "take_blocks", 40)
            pair.ask("d", prompt(150, seed=3), 5)
            pair.step(8)
            pair.abort("d")
            pair.on("decode", "free_blocks")
            pair.step(2 + int(seconds / STEP))
        return Path(dump.write("exit")).read_text()


def split(text: str, folder: Path) -> dict[str, Path]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    files = {}
    for pid, (name, clocks) in enumerate(CLOCKS.items(), 100):
        own = [line for line in lines if line["kind"] == "connector" and str(line.get("engine", "")).startswith(name)]
        numbers = {line["number"] for line in own}
        events = [line for line in lines if line["kind"] == "event" and line["connector"] in numbers]
        files[name] = on_node(folder / f"{name}.jsonl", {**lines[0], "pid": pid}, own, events, name, clocks)
    return files
