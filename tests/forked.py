"""A process that has imported vLLM, and its forks. This saves 12 s of a core for each process of a test.

EngineCore and worker of an engine are forks too, as on a GPU. vLLM for the CPU starts new processes (cpu.py
0.32.0:409), so this needs a stand-in if LMCache is already imported (tests/engine/plugin/kvfix_engine_test.py).
Programs that must start and end like a user's program are not forked.
"""

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
#: Read once, by the process that is forked.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: Upstream's tests look up models.
HUB = Path(__file__).parent.parent / ".cache/peers/hub"


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs this function of fork_server.py."""
    quick.skip()
    from maintain import peers  # not in the process that is forked: it has nothing of kvfix

    with mock.patch.dict(os.environ, {**ENVIRONMENT, **peers.hub(HUB)}):
        CONTEXT.set_forkserver_preload(["tests.preloaded"])
        forkserver.ensure_running()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


class Forked:
    """The parts of subprocess.Popen that the tests need."""

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
