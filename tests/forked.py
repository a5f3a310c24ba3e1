"""A process that has imported vLLM, and its forks: 12 s of a core less for each process of a test.

It is the fork server of `multiprocessing`, one for each process of pytest, and has nothing of LMCache or kvfix.
EngineCore and worker of an engine are forks too, as on a GPU; vLLM for the CPU would start each anew (cpu.py
0.32.0:409); that takes a stand-in where LMCache is imported already (tests/engine/plugin/kvfix_engine_test.py). A
program that is to start and end as a user's does is none of them.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tests import fork_server, quick

CONTEXT = multiprocessing.get_context("forkserver")
#: What every engine imports, and the lab.
PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "transformers.models.llama.modeling_llama",
    "tests.conftest",
]
#: Read once, by the process that is forked.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def spawn(target: Callable[..., None], *arguments: Any, environment: dict[str, str]) -> Any:
    """A process of its own, for what reads its environment when it is imported."""
    quick.skip()
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    with mock.patch.dict(os.environ, environment, clear=True):
        process.start()
    return process


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs this function of fork_server.py."""
    quick.skip()
    with mock.patch.dict(os.environ, ENVIRONMENT):
        CONTEXT.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


class Forked:
    """Like subprocess.Popen, as far as it is needed here."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdout: IO[str], stderr: IO[str], cwd: Path, **_: Any
    ) -> None:
        """command: Python, and a program's file or `-m` and a module, with arguments. stdout, stderr: named files."""
        self._process = start(fork_server.run_program, command[1:], env, str(cwd), stdout.name, stderr.name)
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return code
