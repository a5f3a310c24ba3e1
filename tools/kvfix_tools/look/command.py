"""The command `kvfix look`: read the engine again and again until kvfix has a verdict or sees no sign of a problem."""

import json as jsonlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.live import Live

from kvfix.ledger import liveness, standstill
from kvfix.ledger.liveness import LOAD, LOOKUP
from kvfix.ledger.standstill import HOOK, LATE, Look, Verdict, moved, of_these_hooks
from kvfix_tools import screen
from kvfix_tools.doctor import servers
from kvfix_tools.dump import gather
from kvfix_tools.look import looking, show

SCHEMA = 1
#: kvfix looks every PAUSE seconds. During a step without running requests, the scheduler's queues may be incomplete. In
#: this case, kvfix looks again immediately, at most AGAIN times.
PAUSE, AGAIN = 1.0, 30
_LONGEST = 600  # Time limit of PyStack in seconds. A core file of an engine has many gigabytes.
_THREAD = re.compile(r"^Traceback for thread (\d+)")
_FRAME = re.compile(r'^\s+\(Python\) File "(.*)", line (\d+), in (.+)$')


def look(pid: int, watch: bool, request: str, json: bool, save: str) -> int:
    """Return 0 without a verdict, 1 with a verdict, 77 if kvfix may not read the process, 2 after any other error."""
    tree = looking.engine_of(servers.client_of(pid) or pid)
    if not tree:
        return screen.error(f"kvfix look: {looking.why_none(pid)}")
    processes = ", ".join(f"{each.pid} ({each.name})" for each in tree)
    print(f"kvfix look stops each of these processes for a moment: {processes}", file=sys.stderr)
    looker = looking.Looker(tree, full=bool(save))
    if watch:
        return _watch(looker)
    looks = enough(looker)
    found = standstill.verdicts(looks)
    ways = [looker.ways[process.pid] for process in tree]
    if not liveness.engines(looks[-1].processes) and not found:
        for line in show.way_lines(ways):
            print(f"kvfix look: {line}", file=sys.stderr)
        if any(each.how in (looking.STACKS, looking.NOT) for each in ways):
            return 77
    if save:
        try:
            save_state(save, looks[-1], found)
        except OSError as error:
            return screen.error(f"kvfix look: {save}: {error.strerror}")
    if json:
        print(jsonlib.dumps(_answer(looks[-1], found, ways), indent=2))
    elif request:
        lines = [line for engine in liveness.engines(looks[-1].processes) for line in show.request(engine, request)]
        if not lines:
            return screen.error(f"kvfix look: the engine has no request {request}")
        print("\n".join(lines))
    else:
        screen.console().print(show.screenful(looks, found, ways))
    return int(bool(found))


def enough(looker: looking.Looker) -> list[Look]:
    """Look at least twice, until kvfix has a verdict or sees no sign of a problem."""
    looks = [_between_steps(looker)]
    while seconds_to_look(looks) or len(looks) < 2:
        time.sleep(max(0.0, PAUSE - (time.monotonic() - looks[-1].at)))
        looks.append(_between_steps(looker))
        if _in_step(looks[0]) and not _in_step(looks[-1]):
            del looks[0]  # kvfix cannot compare the incomplete queues of the first look with later queues
    return looks


def _in_step(look: Look) -> bool:
    return any(each.process["in_step"] for each in liveness.engines(look.processes))


def seconds_to_look(looks: Sequence[Look]) -> float:
    """Return how many seconds must lie between the first and the last look. Return 0 if the looks already suffice."""
    if standstill.verdicts(looks):
        return 0.0
    looks = of_these_hooks(looks)
    seconds = 0.0
    last = looks[-1].processes
    in_hook = any(each.get("hook") or each.get("silent") for each in last)
    for engine in liveness.engines(last):
        waits = liveness.waits(engine)
        if {kind for _, kind in waits} & {LOAD, LOOKUP} and not liveness.state(engine).running:
            seconds = LATE
        lost = [row for row, kind in waits if kind == LOAD and not engine.ranks_with(row["id"], *liveness.KINDS)]
        if lost or liveness.can_move(liveness.state(engine)).verdict == "violated":
            seconds = max(seconds, 1.0)
    span = looks[-1].at - looks[0].at
    if len(looks) > 1 and span >= 1.0 and moved(looks):
        seconds = 0.0
    seconds = max(seconds, HOOK if in_hook else 0.0)
    return seconds if span < seconds else 0.0


def _between_steps(looker: looking.Looker) -> Look:
    for _ in range(AGAIN):
        found = looker.look()
        idle = [one for one in liveness.engines(found.processes) if all(r["queue"] != "running" for r in one.requests)]
        if not any(each.process["in_step"] and not each.process["hook"] for each in idle):
            break
    return found


def _watch(looker: looking.Looker) -> int:
    looks: list[Look] = []
    live = Live(console=screen.console(), auto_refresh=False, screen=sys.stdout.isatty())
    with suppress(KeyboardInterrupt), live:
        while True:
            looks = [*looks[-30:], _between_steps(looker)]
            live.update(show.screenful(looks, standstill.verdicts(looks), looker.ways.values()), refresh=True)
            time.sleep(max(0.0, PAUSE - (time.monotonic() - looks[-1].at)))
    return int(bool(standstill.verdicts(looks)))


def _answer(last: Look, found: Sequence[Verdict], ways: Sequence[looking.Way]) -> dict[str, Any]:
    """Return the JSON object for `--json` and `--save`. With `--save`, the object also has each request's blocks."""
    engines = liveness.engines(last.processes)
    return {
        "schema": SCHEMA,
        "kind": "look",
        "verdicts": [show.as_dict(each, last.processes) for each in found],
        "owes": {row["id"]: show.waits_for(engine, row) for engine in engines for row in engine.requests},
        "ways": [each._asdict() for each in ways],
        "servers": servers.of(last.processes),
        "processes": last.processes,
    }


def save_state(file: str, last: Look, found: Sequence[Verdict]) -> None:
    """Write the state into a file that only its owner can read."""
    Path(file).touch(0o600)
    Path(file).write_text(jsonlib.dumps(_answer(last, found, [])), encoding="utf-8")


def look_at_core(file: str, json: bool) -> int:
    """Show the stacks in a core file. PyStack reads the stacks, but no variables.

    Return 1 if a thread is in a connector hook, else 0. Return 2 for an unreadable file, and 77 without PyStack.
    """
    pystack = gather.program("pystack")
    if pystack is None:
        why = "PyStack, which reads core files, is not installed. Run: pip install pystack"
        return screen.error(f"kvfix look: {why}", 77)
    command = [pystack, "--no-color", "core", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
    threads = stacks(done.stdout)
    if not threads:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return screen.error(f"kvfix look: {file}: {lines[-1] if lines else 'no Python thread'}")
    found = [{"thread": thread, **looking.of_stack(frames)} for thread, frames in threads.items()]
    in_hook = [each for each in found if each["hook"]]
    if json:
        print(jsonlib.dumps({"schema": 1, "kind": "core", "threads": found}, indent=2))
        return int(bool(in_hook))
    for each in in_hook:
        print(f"thread {each['thread']} was in {each['hook']}, at {each['stack'][0]}")
    if not in_hook:
        print(f"none of {len(found)} threads was in a connector hook")
    for each in found:
        print(f"\nthread {each['thread']}, innermost frame first:")
        print("\n".join(f"    {frame}" for frame in each["stack"]))
    return int(bool(in_hook))


def stacks(text: str) -> dict[int, list[tuple[str, str, int]]]:
    """Return {thread: its frames, innermost first}. PyStack prints the innermost frame last."""
    found: dict[int, list[tuple[str, str, int]]] = {}
    frames: list[tuple[str, str, int]] = []
    for line in text.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            frames = found.setdefault(int(thread[1]), [])
        elif frame:
            frames.insert(0, (frame[3], frame[1], int(frame[2])))
    return {thread: frames for thread, frames in found.items() if frames}
