"""Starts a program in a fork of a process that has imported vLLM: 12 s of a core less for each process of an engine.

EngineCore and worker are forks too, as on a GPU; vLLM for the CPU would start each anew (cpu.py 0.32.0:409). Two kinds
are not: a program that is to start and end as a user's does (start.run() has `forked`), and the workers of a
multi-process connector. Those do not start where LMCache is imported already: vLLM's dispatcher for Triton's kernels
trips over an object of its modules (triton_utils/dispatcher.py 0.32.0:139).
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any
from unittest import mock

from kvfix_tools.roundtrip import real_engine
from tests.conftest import clean_environment

CONTEXT = multiprocessing.get_context("forkserver")
FORK = multiprocessing.get_context("fork")
#: In a program's environment: what vLLM starts is forked too.
FORK_WORKERS = "KVFIX_TEST_FORK"
#: What every engine imports, and nothing of LMCache or kvfix.
PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "transformers.models.llama.modeling_llama",
]


class Forked:
    """Like subprocess.Popen, as far as real_engine.run() needs it."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: IO[str], cwd: Path, **_: Any) -> None:
        """command: Python, a program's file or `-m` and a module, one argument. stdout: a file that has a name."""
        # Hash seed and number of threads are read once, by the process that is forked.
        with mock.patch.dict(os.environ, {**clean_environment(), **real_engine.ENVIRONMENT}, clear=True):
            CONTEXT.set_forkserver_preload(PRELOADED)
            forkserver.ensure_running()
        self._process = CONTEXT.Process(target=run_program, args=(command[1:], env, str(cwd), stdout.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return self._process.exitcode


def run_program(arguments: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    """In the fork: the program, as `python PROGRAM ARGUMENT`. Its end is abrupt: vLLM takes 8 s to end its processes,
    and who started it kills them."""
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    *flags, program, argument = arguments
    sys.path[:0] = [str(Path(program).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv = [program, argument]
    if FORK_WORKERS in environment:
        multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
    code = 1
    try:
        (runpy.run_module if flags else runpy.run_path)(program, run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
