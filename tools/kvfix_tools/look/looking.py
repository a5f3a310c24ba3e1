"""Read the state of each process of an engine: by code inside the process, from its recorder, or by py-spy's stacks."""

import hashlib
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import kvfix.engine_state
from kvfix.engine_state import places
from kvfix.ledger.standstill import Look
from kvfix_tools.dump import gather, processes
from kvfix_tools.dump.processes import Process
from kvfix_tools.look import inject
from kvfix_tools.look.other_process import OTHER_NAMESPACE

PATIENCE = 4.0  # maximum seconds until a main thread runs Python code. A lookup of LMCache takes up to 3 s
#: A process runs vLLM or LMCache if a mapped library matches _LIBRARY, or a word of its command matches _PROGRAM.
_LIBRARY = re.compile(r"/(?:vllm|lmcache)/[^/\n]+\.so\b")
_PROGRAM = re.compile(r"(?:^|/)(?:vllm|lmcache)(?:[._][\w.]+)?$|^VLLM::")
INSIDE, RECORDER, STACKS, NOT = "inside", "by its recorder", "by its stacks only", "not read"
#: The answer of a process without the modules of kvfix.engine_state. kvfix then sends the modules to the process.
MISSING = "null"
#: The package itself ("") is last, because it imports the other modules.
_MODULES = ("places", "reader", "lmcache_readers", "scheduler", "")
_BRING = """
import sys
name, parts = {name!r}, {parts!r}
if name not in sys.modules:
    made = [name]
    try:
        package = sys.modules[name] = type(sys)(name)
        package.__path__, package.__package__ = [], name
        for part, text in parts:
            module = package
            if part:
                made.append(name + "." + part)
                module = sys.modules[made[-1]] = type(sys)(made[-1])
                module.__package__ = name
                setattr(package, part, module)
            exec(compile(text, "engine_state/" + (part or "__init__") + ".py", "exec"), module.__dict__)
    except BaseException:
        for each in made:
            sys.modules.pop(each, None)
        raise
"""
#: This code is short, because the engine's main thread compiles the code in each look.
_ASK = """
import sys
package, answer = sys.modules.get({name!r}), "null"
if package is not None:
    import json
    answer = json.dumps(package.collect({full!r}))
with open(ANSWER, "w") as file:
    file.write(answer)
"""


class Way(NamedTuple):
    """How kvfix read a process. reason: why code in the process gave no answer. setting: what the user can change."""

    pid: int
    name: str
    how: str
    reason: str
    setting: str


def engine_of(pid: int) -> list[Process]:
    """Return all processes of the engine to which the process `pid` belongs. Return [] if there is no such engine."""
    tree = processes.tree(_root(pid))
    return with_vllm([*tree, *processes.elsewhere(tree)], pid)


def with_vllm(tree: list[Process], pid: int) -> list[Process]:
    """Return the processes that have loaded vLLM or LMCache, but not kvfix's own process. No process is stopped."""
    # A process with PyTorch alone counts if it is the process `pid`, or if its parent or child has vLLM or LMCache.
    tree = [each for each in tree if each.pid != os.getpid()]
    maps = {each.pid: processes.proc_text(each.pid, "maps") for each in tree}
    sure = {each.pid for each in tree if _has_vllm(each, maps[each.pid])}
    near = {pid, *(each.parent for each in tree if each.pid in sure)}
    return [
        each
        for each in tree
        if each.pid in sure or ((each.pid in near or each.parent in sure) and _may_have_vllm(each, maps[each.pid]))
    ]


def why_none(pid: int) -> str:
    """Return why `engine_of` finds no process for this process id."""
    if not psutil.pid_exists(pid):
        return f"there is no process {pid}. {OTHER_NAMESPACE}"
    name = ""
    with suppress(psutil.Error):
        name = f" ({psutil.Process(pid).name()})"
    return (
        f"neither process {pid}{name} nor any of its child processes has loaded vLLM or LMCache. "
        "Give the process id of a process of the engine."
    )


def _root(pid: int) -> int:
    """Return the engine's first process. From `pid`, go up over processes that vLLM or multiprocessing started."""
    try:
        process = psutil.Process(pid)
        while (parent := process.parent()) is not None and parent.pid > 1:
            command, above = process.cmdline(), parent.cmdline()
            is_child = "VLLM::" in " ".join([process.name(), *command[:1]])
            if not is_child and command != above and not any("multiprocessing" in word for word in command):
                break
            process = parent
        return int(process.pid)
    except (psutil.Error, ValueError):
        return pid


def _has_vllm(process: Process, maps: str) -> bool:
    """Return True if the process has a library, name or command of vLLM or LMCache, or runs kvfix's recorder."""
    if _LIBRARY.search(maps):
        return True
    named = "VLLM::" in process.name or any(_PROGRAM.search(word) for word in process.command[:3])
    return (named and (not maps or "python" in maps)) or bool(processes.ready(process))


def _may_have_vllm(process: Process, maps: str) -> bool:
    """Return True if the process has PyTorch, but is no helper process of multiprocessing. A helper runs no engine."""
    if any("resource_tracker" in word or "forkserver import main" in word for word in process.command):
        return False
    return not maps or "/libtorch" in maps  # empty maps: kvfix may not read the process, and look() reports why


@cache
def _sources() -> tuple[str, list[tuple[str, str]]]:
    """Return (name for the package in the process, [(module, its code)]). The name has a digest of the code."""
    folder = Path(kvfix.engine_state.__file__).parent
    texts = [(each, (folder / f"{each or '__init__'}.py").read_text(encoding="utf-8")) for each in _MODULES]
    return f"_kvfix_engine_state_{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]}", texts


class Looker:
    def __init__(self, tree: list[Process], full: bool) -> None:
        self.tree = tree
        self.ways: dict[int, Way] = {}
        self._full = full
        self._known: set[int] = set()

    def look(self) -> Look:
        """Read all processes at once. A look takes milliseconds, or seconds if a main thread runs no Python code."""
        with ThreadPoolExecutor(max(1, len(self.tree))) as pool:
            read = list(pool.map(self._read, self.tree))
        at = time.monotonic()
        for process, (_, *way) in zip(self.tree, read, strict=True):
            self.ways[process.pid] = Way(process.pid, process.name, *way)
        return Look(at, [state for state, *_ in read if state is not None])

    def _read(self, process: Process) -> tuple[dict[str, Any] | None, str, str, str]:
        setting = ""
        try:
            return self._inside(process), INSIDE, "", ""
        except inject.Refused as refused:
            reason, setting = refused.reason, refused.setting
            text, _ = gather.recorder(process)  # the recorder of kvfix in the process also writes the state
            lines = [line for line in (text or "").splitlines() if line.startswith('{"kind":"state"')]
            if lines:
                return {**json.loads(lines[-1]), "name": process.name}, RECORDER, reason, setting
        except inject.Silent as silent:
            reason = str(silent)
        except (ValueError, OSError) as error:
            reason = f"the answer of the process cannot be read: {error}"
        threads, why = gather.stacks(process.pid)
        if not threads:
            return None, NOT, f"{reason}; {why}", setting
        main = gather.main_frames(threads)
        frames = [(each["name"].rpartition(".")[2], each["filename"] or "", each["line"] or 0) for each in main]
        about = {"pid": process.pid, "process": process.name, "name": process.name, "silent": reason}
        return {**about, **of_stack(frames)}, STACKS, reason, setting

    def _inside(self, process: Process) -> dict[str, Any]:
        name, sources = _sources()
        ask = _ASK.format(name=name, full=self._full)
        for brings in (False, True) if process.pid in self._known else (True,):
            code = _BRING.format(name=name, parts=sources) + ask if brings else ask
            answer = inject.run(process.pid, code, seconds=PATIENCE)
            if answer.startswith(inject.FAILED):
                raise ValueError(answer.removeprefix(inject.FAILED))
            if answer != MISSING:
                self._known.add(process.pid)
                return {**json.loads(answer), "name": process.name}
        raise ValueError("the process no longer has the modules that kvfix sent")


def of_stack(frames: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return "stack" and "hook" as `engine_state` returns them. frames: (function, file, line), innermost first."""
    return {"stack": places.stack(frames), "hook": places.hook(frames)}
