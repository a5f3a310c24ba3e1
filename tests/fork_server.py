"""Fork a process that has imported vLLM (preloaded.py). Each fork runs one program, or starts further forks.

A fork saves 12 s of imports. EngineCore and the workers of an engine are forks too, although vLLM for the CPU starts
new processes by default (cpu.py 0.32.0:409). Programs that must start and end like a user's program are not forked.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tests import quick

FORK = multiprocessing.get_context("fork")
CONTEXT = multiprocessing.get_context("forkserver")
#: A process reads these variables only once, so the tests set the variables before the forks.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: A Hugging Face cache with each model that the test suites of vLLM and LMCache use (maintain/peers.py).
HUB = Path(__file__).parent.parent / ".cache/peers/hub"
#: In a program with this environment variable, vLLM forks EngineCore and the workers.
FORK_WORKERS = "KVFIX_TEST_FORK"


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a fork that runs `target`, a function of this module."""
    quick.skip()
    from maintain import peers  # not at the top, because the process to be forked must not import kvfix

    with mock.patch.dict(os.environ, {**ENVIRONMENT, **peers.hub(HUB)}):
        CONTEXT.set_forkserver_preload(["tests.preloaded"])
        forkserver.ensure_running()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


class Forked:
    """A forked program, with the methods of subprocess.Popen that the tests need."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdout: IO[str], stderr: IO[str], cwd: Path, **_: Any
    ) -> None:
        self._process = start(run_program, command[1:], env, str(cwd), stdout.name, stderr.name)
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return code


def run_program(arguments: list[str], environment: dict[str, str], folder: str, output: str, errors: str) -> None:
    """Run `python PROGRAM ARGUMENT...`, or `python -m MODULE ARGUMENT...`, in a new session."""
    os.setsid()
    os.chdir(folder)
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    set_environment(environment)
    module = arguments[0] == "-m"
    program, *rest = arguments[1:] if module else arguments
    sys.path[:0] = [str(Path(program).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv = [program, *rest]
    if FORK_WORKERS in environment:
        multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
    code = 1
    try:
        (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skip vLLM's shutdown, which takes 8 s; the test kills vLLM's other processes


def serve(connection: Connection, first: str, environment: dict[str, str]) -> None:
    """Run each received job in a fork, and send the job's result. first: Python code to run before the first fork."""
    set_environment(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    assert not any(name.startswith(("lmcache", "kvfix")) for name in sys.modules)
    with contextlib.redirect_stdout(sys.stderr):
        exec(first, {})
    gc.collect()
    gc.freeze()  # without freeze(), a garbage collection in a fork visits all objects, and so copies their memory
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_forked(connection.recv()))


def set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _forked(job: dict[str, str]) -> dict[str, Any]:
    here, there = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryFile() as printed:
        pid = os.fork()
        if pid == 0:
            _run(job, there, printed.fileno())
        there.close()
        answer: dict[str, Any] = {"result": None, "error": "the forked process ended before it returned a result\n"}
        with contextlib.suppress(EOFError):
            answer = here.recv()
        here.close()
        os.waitpid(pid, 0)
        printed.seek(0)
        return {**answer, "printed": printed.read().decode(errors="replace")}


def _run(job: dict[str, str], answer_to: Connection, print_to: int) -> None:
    os.dup2(print_to, 2)
    os.dup2(print_to, 1)
    if job["lmcache"]:
        sys.path.insert(0, job["lmcache"])
    names: dict[str, Any] = {"result": None}
    answer = error = None
    try:
        exec(compile(job["code"], "<case>", "exec"), names)
        answer = json.dumps(names["result"])
    except BaseException:  # noqa: BLE001
        error = traceback.format_exc()
    answer_to.send({"result": answer, "error": error})
    os._exit(0)
