"""Apply, remove and list the fixes in a running engine (`kvfix attach`, `kvfix detach`, `kvfix status PID`)."""

import inspect
import json as jsonlib
import os
import time
from typing import Any

from rich.table import Table

import kvfix
from kvfix.config import Config
from kvfix_tools import screen
from kvfix_tools.command_options import Names
from kvfix_tools.dump import processes
from kvfix_tools.look import in_engine, inject, looking

#: _SECONDS: maximum seconds until a main thread returns from C code to Python. _PAUSE: seconds between two tries.
_SECONDS, _PAUSE = 5.0, 0.03
#: Code that runs in each process. A new thread imports kvfix, because the import takes a second. `source` is the
#: text of in_engine.py. The thread runs this text once, as a module that stays in the process.
_CODE = """
import json, sys
def prepare(held, folder, version):
    try:
        try:
            import kvfix
        except ImportError:
            sys.path.append(folder)
            import kvfix
        if kvfix.__version__ != version:
            raise ImportError("the process has kvfix " + kvfix.__version__ + ", and this command is kvfix " + version)
        module = type(sys)("kvfix_in_engine")
        exec(compile({source!r}, "kvfix/in_engine.py", "exec"), vars(module))
        module.prepare()
        held["module"] = module
    except BaseException as error:
        held["error"] = type(error).__name__ + ": " + str(error)
what, arguments = {what!r}, {arguments!r}
held = vars(sys).get("_kvfix_attaching")
if what in ("state", "detach") and "kvfix" not in sys.modules or not {{"vllm", "lmcache"}} & sys.modules.keys():
    answer = {{"state": "without"}}
elif held is None:
    import _thread
    held = sys._kvfix_attaching = {{"module": None, "error": ""}}
    _thread.start_new_thread(prepare, (held, {folder!r}, {version!r}))
    answer = {{"state": "preparing"}}
elif held["error"]:
    answer = {{"state": "failed", "where": held["error"]}}
    del sys._kvfix_attaching
elif held["module"] is None:
    answer = {{"state": "preparing"}}
else:
    answer = getattr(held["module"], what)(*arguments)
with open(ANSWER, "w") as file:
    json.dump(answer, file)
"""


class _Engine:
    """The processes of an engine. answers: {pid: last answer} of each Python process."""

    def __init__(self, pid: int, wait: float) -> None:
        self.processes = {each.pid: each for each in looking.with_vllm(processes.tree(pid), pid)}
        self.answers: dict[int, dict[str, Any]] = {}
        self.settings: list[str] = []
        self._until = time.monotonic() + wait

    def ask(self, pids: list[int], what: str, *arguments: Any, until: tuple[str, ...]) -> None:
        """Call `what` in each process until a state in `until` is reached, the call fails, or the wait time is over."""
        left = list(pids)
        while left:
            for pid in list(left):
                answer = self.answers[pid] = self._once(pid, what, arguments)
                if answer["state"] in (*until, "without", "failed", "silent", "refused"):
                    left.remove(pid)
            if time.monotonic() > self._until:
                return
            time.sleep(_PAUSE if left else 0)

    def _once(self, pid: int, what: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Call `what` once. Return state "without" if kvfix can do nothing in this process (for example, no vLLM)."""
        folder = os.path.dirname(os.path.dirname(os.path.abspath(kvfix.__file__)))
        source = inspect.getsource(in_engine)
        code = _CODE.format(what=what, arguments=arguments, folder=folder, version=kvfix.__version__, source=source)
        try:
            text = inject.run(pid, code, seconds=_SECONDS)
        except inject.Silent as silent:
            return {"state": "silent", "where": str(silent)}
        except inject.Refused as refused:
            if refused.setting:
                self.settings.append(str(refused))
                return {"state": "refused", "where": str(refused)}
            return {"state": "without"}
        if text.startswith(inject.FAILED):
            return {"state": "failed", "where": text.removeprefix(inject.FAILED)}
        return dict(jsonlib.loads(text))

    def having(self, scheduler: bool) -> list[int]:
        return [pid for pid, answer in self.answers.items() if answer.get("scheduler") is scheduler]


def attach(pid: int, mode: str, only: Names, idle: bool, wait: float, json: bool, plus: Names = None) -> int:
    """Apply the fixes. Return 0 for success, 1 for a failure, 2 for wrong usage, 77 if kvfix cannot trace a process."""
    try:
        config = Config(mode, only, None, plus=plus)
        if mode == "strict":
            raise ValueError("mode strict ends the engine at a violation. Attach with --mode check")
    except ValueError as error:
        return screen.error(f"kvfix attach: {error}")
    engine = _Engine(pid, wait)
    engine.ask(list(engine.processes), "ready", until=("ready",))
    workers, schedulers = engine.having(scheduler=False), engine.having(scheduler=True)
    # Workers come first, because the scheduler's fixes need the workers' fixes.
    for pids in (workers, schedulers):
        engine.ask(pids, "attach", str(config), idle and pids is schedulers, until=("attached",))
    before = [name for each in schedulers for name in engine.answers[each].get("before", ())]
    kept = {each: dict(engine.answers[each]) for each in workers}
    if config.mode != "fix":
        engine.ask(workers, "attached", before, until=("attached",))
        engine.answers.update(kept)
    return _show(engine, pid, "attached", json)


def detach(pid: int, wait: float, json: bool) -> int:
    """Remove the fixes, from the scheduler's process first. Return the same exit codes as `attach`."""
    engine = _Engine(pid, wait)
    engine.ask(list(engine.processes), "ready", until=("ready",))
    for pids in (engine.having(scheduler=True), engine.having(scheduler=False)):
        engine.ask(pids, "detach", until=("detached",))
    return _show(engine, pid, "detached", json)


def status(pid: int, json: bool) -> int:
    engine = _Engine(pid, _SECONDS)
    engine.ask(list(engine.processes), "state", until=("there",))
    return _show(engine, pid, "there", json)


def _show(engine: _Engine, pid: int, wanted: str, json: bool) -> int:
    if not engine.processes:
        return screen.error(f"kvfix: {looking.why_none(pid)}")
    shown = {each: answer for each, answer in engine.answers.items() if answer["state"] != "without"}
    if json:
        fields = ("state", "where", "mode", "requests", "rows")
        listed = [
            {"pid": each, "name": engine.processes[each].name, **{key: answer.get(key) for key in fields}}
            for each, answer in shown.items()
        ]
        print(jsonlib.dumps(listed, indent=2))
    else:
        _print(engine, shown, wanted)
    if engine.settings:
        return screen.error("\n".join(dict.fromkeys(engine.settings)), 77)
    done = shown and all(answer["state"] == wanted for answer in shown.values())
    rows = [row for answer in shown.values() for row in answer.get("rows", ())]
    # Exit 1 if a fix is refused, undecided or has raised. A fix that applies only at the engine's start is no failure.
    return int(not done or any(row["verdict"] in ("refused", "unknown") or row.get("faults") for row in rows))


def _print(engine: _Engine, shown: dict[int, dict[str, Any]], wanted: str) -> None:
    console = screen.console()
    if not shown:
        console.print(f"No process of the engine runs vLLM or LMCache{' together with kvfix' * (wanted == 'there')}.")
    for pid, answer in shown.items():
        mode = f" (mode {answer['mode']})" if "mode" in answer else ""
        where = f": {answer['where']}" if answer.get("where") else ""
        console.print(f"{pid} {engine.processes[pid].name}: {answer['state']}{mode}{where}", markup=False)
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
        for row in answer.get("rows", ()):
            counted = f"acted {row.get('acted', 0)} times, {row.get('faults', 0)} errors in kvfix's own code"
            shown_counts = counted if row.get("acted") or row.get("faults") else ""
            table.add_row("", row["code"], row["slug"], row["verdict"], shown_counts or row["reason"])
        if table.row_count:
            console.print(table)
