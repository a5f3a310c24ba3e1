"""Logs of real engines in which a fault was planted: `python -m tests.engine.planted_logs FOLDER [NAME ...]`.

planted_cases.py has the cases. Each starts vLLM's server, most often with a set-up that cannot work, and keeps the logs
in FOLDER/NAME, with the paths of this machine replaced. It prints what kvfix-diagnose finds, and what kvfix doctor says
before the launch. Without names: the cases that FOLDER does not have yet.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import shutil
import signal
import socket
import string
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvfix_tools.doctor import checks, command_line
from kvfix_tools.doctor.packages import Packages
from kvfix_tools.doctor.setup import Setup
from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.real_engine import prompt
from tests.conftest import ROOT
from tests.engine import healthy_logs, pd
from tests.verify import served

#: Seconds for an answer, and for an engine that was told to end.
ANSWER, END = 60, 40
#: Checks of kvfix doctor that say nothing about the planted fault: they are about this machine.
_OF_THE_MACHINE = ("extensions", "gpu", "pinned-memory", "locked-memory", "program")


class Engine(served.Served):
    """vLLM's server, as released. For LMCache in process, the plugin puts in a stand-in for the GPU connector."""

    def __init__(self, folder: Path, transfer: Any, options: tuple[str, ...] = (), **environment: str) -> None:
        super().__init__(folder, "off", transfer, **environment)
        del self.environment["KVFIX_TEST_REAL_CONNECTOR"]
        self.options = [*served.Served.options, *options]
        if "PORT" in environment:
            self.port = int(environment["PORT"])
            self.url = f"http://127.0.0.1:{self.port}"

    def begin(self) -> bool:
        """False if it does not start."""
        self.start(**served.SIZES)
        with suppress(AssertionError):
            self.until_started()
            return True
        return False

    def command(self) -> list[str]:
        return ["vllm", "serve", str(self.folder.parent / "model"), *self.words(served.SIZES)]

    def ask(self, *requests: pd.Request, **more: Any) -> list[dict[str, Any] | None]:
        return [self._post(request, more) for request in requests]

    def _post(self, request: pd.Request, more: Mapping[str, Any]) -> dict[str, Any] | None:
        with suppress(httpx.HTTPError):
            return pd.post(self.url, request, ANSWER, **more)
        return None

    def twice(self) -> None:
        """Send four prompts of four or more chunks each. Then reset vLLM's prefix cache and send them again."""
        self.ask(*REQUESTS)
        with suppress(httpx.HTTPError):
            httpx.post(f"{self.url}/reset_prefix_cache", timeout=ANSWER)
        self.ask(*REQUESTS)

    def process_named(self, name: str) -> int:
        """Return the pid that the log has for this process name."""
        found = re.findall(rf"\({name} pid=(\d+)\)", self.log.read_text())
        return int(found[-1])

    def end(self) -> None:
        """As an orderly shutdown: SIGTERM to the API server."""
        if self.process.poll() is None:
            with suppress(Exception):
                os.kill(self.process.pid, signal.SIGTERM)
                self.process.wait(END)
        self.kill()


REQUESTS: list[pd.Request] = [(prompt(300, seed), 6) for seed in range(1, 5)]


@dataclass
class Run:
    """One run of a case.

    values: what `$NAME` stands for in the settings of the case. warned: the problems that kvfix doctor sees.
    """

    folder: Path
    values: dict[str, str] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)
    things: dict[str, Any] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def enter(self, context: AbstractContextManager[Any]) -> Any:
        return self.stack.enter_context(context)

    @contextmanager
    def running(self, case: Case, name: str = "engine", **settings: Any) -> Iterator[Engine | None]:
        """Start the engine and yield it, or None if it does not start.

        End it afterwards. settings: what differs from the case's own.
        """
        engine = self._engine(case, name, **settings)
        self.doctor(engine.command(), {**os.environ, **engine.environment})
        try:
            yield engine if engine.begin() else None
        finally:
            engine.end()

    def doctor(self, words: list[str], environment: Mapping[str, str]) -> None:
        """Note the problems that kvfix doctor sees before the launch."""
        places = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
        setup = Setup(command_line.read(words), environment, Packages([*places, *sys.path]), limit=1)
        for each in checks.catalogue():
            if each.name not in _OF_THE_MACHINE:
                found = [line for line in each.look(setup) if line.status == checks.PROBLEM]
                self.warned += [f"{each.name}: {line.what}" for line in found]

    def _engine(self, case: Case, name: str, **settings: Any) -> Engine:
        case = replace(case, **settings)
        words = {name: string.Template(text).substitute(self.values) for name, text in case.environment.items()}
        if case.file is not None:
            file = self.folder / "lmcache.yaml"
            file.write_text(string.Template(case.file).substitute(self.values))
            words["LMCACHE_CONFIG_FILE"] = str(file)
        text = case.transfer if isinstance(case.transfer, str) else json.dumps(case.transfer)
        text = re.sub(r'"(\$(SERVER|FREE))"', r"\1", text)  # a port is a number
        transfer = string.Template(text).substitute(self.values)
        options = tuple(string.Template(each).substitute(self.values) for each in case.options)
        engine = Engine(self.folder / name, transfer if case.transfer else None, options, **words)
        self.logs[name] = engine.log
        return engine


def ask_twice(run: Run, engine: Engine) -> None:
    engine.twice()


@dataclass
class Case:
    """One case. $NAME in transfer, options, environment and file is replaced by a value of the run.

    truth: the cause in one sentence, written before the first run; "" for a healthy twin
    code: the first finding of kvfix-diagnose
    setup: True if the fault can be seen before the launch
    before: makes the values of the run, and other things that the engine needs
    play: runs while the engine runs
    main: plays the whole case without an engine of its own, in place of the other fields
    """

    name: str
    truth: str = ""
    remedy: str = ""
    twin: str = ""
    code: str = ""
    setup: bool = True
    transfer: Any = None
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    file: str | None = None
    before: Callable[[Run], None] = lambda run: None
    play: Callable[[Run, Engine], None] = ask_twice
    main: Callable[[Case, Run], None] | None = None


def run(case: Case, folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder / case.name, ignore_errors=True)
    here = folder / case.name
    here.mkdir(parents=True)
    served.write_model(folder / "model")
    (here / "model").symlink_to(folder / "model")
    (here / "data").mkdir()
    this = Run(here, {"DATA": str(here / "data"), "FREE": str(real_engine.free_port())})
    with this.stack:
        case.before(this)
        if case.main is not None:
            case.main(case, this)
        else:
            with this.running(case) as engine:
                if engine is not None:
                    case.play(this, engine)
    kept = [keep(path, here / f"{case.name}{'' if name == 'engine' else '.' + name}.log.gz", folder)
            for name, path in this.logs.items() if path.exists()]  # fmt: skip
    found = healthy_logs.found(*kept)
    findings = [each.rule.code for each in found.findings if not each.is_note]
    return {"case": case.name, "expected": case.code, "findings": findings, "doctor": this.warned, "logs": len(kept)}


def keep(log: Path, to: Path, folder: Path) -> Path:
    """A copy without paths and addresses of this machine."""
    text = log.read_text(errors="replace")
    here, base = str(to.parent), os.path.realpath(sys.base_prefix)
    for local, neutral in {
        f"{here}/data": "/data", here: "/srv", str(folder): "/srv", here.replace("/", "-"): "-srv",
        f"{ROOT}/.venv/lib/python3.11/site-packages": "/opt/venv/lib", f"{ROOT}/.venv": "/opt/venv",
        str(ROOT): "/opt/src", base: "/usr", sys.base_prefix: "/usr", socket.gethostname(): "host",
        f"{Path.home()}/": "/home/user/",
    }.items():  # fmt: skip
        text = text.replace(local, neutral)
    text = re.sub(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d+\.\d+\.\d+\.\d+(?=[:, ])", "192.0.2.2", text)
    to.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return to


def pack(folder: Path, archive: Path) -> None:
    """Put the logs of all cases into one archive: most of their lines are the same, so together they are small."""
    with tarfile.open(archive, "w:xz") as packed:
        for log in sorted(folder.glob("*/*.log.gz")):
            entry = tarfile.TarInfo(f"{log.parent.name}/{log.name.removesuffix('.gz')}")
            content = gzip.decompress(log.read_bytes())
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def main(arguments: list[str]) -> int:
    from tests.engine.planted_cases import CASES

    parser = argparse.ArgumentParser(prog="python -m tests.engine.planted_logs", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pack", type=Path, metavar="ARCHIVE", help="run nothing, and put the logs into this archive")
    given = parser.parse_args(arguments)
    if given.pack:
        pack(given.folder, given.pack)
        return 0
    for case in CASES:
        if case.name in given.names or (not given.names and not (given.folder / case.name).exists()):
            try:
                print(json.dumps(run(case, given.folder.absolute())), flush=True)
            except Exception:  # noqa: BLE001  the others go on
                print(case.name, traceback.format_exc(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
