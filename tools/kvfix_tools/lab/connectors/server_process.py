"""Run a small, real `lmcache server` in a separate process for the lab, on a CPU and with an L2 on disk."""

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from kvfix import installed_source
from kvfix_tools.lab.options import SERVER_CHUNK
from kvfix_tools.roundtrip import real_engine

#: Maximum number of objects in the server's L1. Each object takes at least one page of memory.
L1_OBJECTS = 96
PAGE = 4096
#: Maximum seconds that the lab waits for the server's answer.
PATIENCE = 30.0
#: A lock counts as leaked if the server still has it after this number of idle seconds.
LINGERING = 5.0
#: HTTP path that shows the status of the thread that completes transfers after the server's answer.
_ENDS_TRANSFERS = "/periodic-threads/DeviceHostFuncDispatcher"
#: Fields of the server's status that count the moves in flight between L1 and L2.
_MOVES = {
    "store_controller": ("pending_keys_count", "in_flight_task_count"),
    "prefetch_controller": ("submission_queue_size", "pending_queue_size", "in_flight_request_count"),
}
_LIBC = ctypes.CDLL(None)


class ServerProcess:
    """A running `lmcache server`. url: the server's address. Raises OSError if the server does not start."""

    def __init__(self, transfer_mode: str = "lmcache_driven") -> None:
        program = shutil.which("lmcache", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        package = installed_source.package_dir("lmcache")
        if program is None or package is None:
            raise FileNotFoundError("the program lmcache is not on PATH")
        self._environment = {
            **os.environ,
            **real_engine.ENVIRONMENT,
            # the server must be of the same release as the connector
            "PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="kvfix-lab-server-")
        port, self._http_port = real_engine.free_port(), real_engine.free_port()
        self.url = f"tcp://localhost:{port}"
        self.disk = f"{self._folder.name}/l2"
        on_disk = {"type": "fs", "base_path": self.disk}
        self._command = [
            program, "server", "--port", str(port), "--http-port", str(self._http_port),
            "--chunk-size", str(SERVER_CHUNK), "--l1-size-gb", str(L1_OBJECTS * PAGE / 2**30), "--no-l1-use-lazy",
            "--eviction-policy", "LRU", "--l2-adapter", json.dumps(on_disk),
            "--supported-transfer-mode", transfer_mode, "--disable-observability",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        #: `close()` ends the server. The exit of this process ends the server too.
        self.close = Finalize(self, ServerProcess._close, (self,), exitpriority=1)
        self.start()

    def start(self) -> None:
        log = Path(self._folder.name, "log")
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=file, stderr=file,
                preexec_fn=lambda: _LIBC.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: end with the parent process
            )  # fmt: skip
        end = time.monotonic() + real_engine.SERVER_LIMIT
        while self.get("/healthcheck") is None:
            if self._process.poll() is not None or time.monotonic() > end:
                why = self.log[-1500:]
                self.close()
                raise OSError(f"the lmcache server does not start: ... {why}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Suspend the server process until `go_on`. Meanwhile, requests wait."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        return Path(self._folder.name, "log").read_text(errors="replace")

    @staticmethod
    def _close(server: "ServerProcess") -> None:
        server.kill()
        server._folder.cleanup()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(HTTPConnection("localhost", self._http_port, timeout=PATIENCE)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status >= 400:
                raise OSError(f"{method} {path}: {response.status} {answer.decode(errors='replace')[:500]}")
            return json.loads(answer)

    def get(self, path: str) -> Any:
        """Return the server's answer, or None after an error."""
        try:
            return self.request("GET", path)
        except (OSError, HTTPException):
            return None

    def until(self, done: Callable[[], bool]) -> None:
        """Poll until `done` returns True or PATIENCE seconds have passed."""
        end, pause = time.monotonic() + PATIENCE, 0.001
        while not done() and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def locks(self) -> dict[str, int]:
        """Wait until the server is idle. Return the numbers of objects in L1, locked objects, and unread lookups."""
        state: dict[str, Any] = {}
        busy_at = time.monotonic()

        def done() -> bool:
            """Return True if the server is idle and has no read lock, or has been idle for LINGERING s."""
            nonlocal busy_at
            state.update(self.request("GET", "/status"))
            storage = state["storage_manager"]
            if any(storage[controller][count] for controller, counts in _MOVES.items() for count in counts):
                busy_at = time.monotonic()
                return False
            locked = storage["l1_manager"]["read_locked_count"]  # LMCache locks objects before it counts their move
            return not locked or time.monotonic() > busy_at + LINGERING

        self.transfers_end()
        self.until(done)
        objects = state["storage_manager"]["l1_manager"]
        return {
            "read locks": objects["read_locked_count"],
            "write locks": objects["write_locked_count"],
            "lookups": state["active_prefetch_jobs"],
            "objects": objects["total_object_count"],
        }

    def transfers_end(self) -> None:
        """Wait until the server has completed all transfers that it has answered."""
        runs = self.request("GET", _ENDS_TRANSFERS)["total_runs"]
        self.until(lambda: self.request("GET", _ENDS_TRANSFERS)["total_runs"] > runs + 1)

    def clear(self) -> None:
        """Empty L1, including locked objects."""
        self.request("POST", "/cache/clear", {"tier": "l1", "force": True})

    def delete(self, keys: list[dict[str, Any]], tier: str, force: bool) -> int:
        """Remove objects from a tier (l1, l2 or all) and return their number. force: remove locked L1 objects too."""
        return int(self.request("DELETE", "/cache/objects", {"keys": keys, "tier": tier, "force": force})["deleted"])


_of_process = functools.cache(lambda pid: ServerProcess())


def of_this_process() -> ServerProcess:
    """Return the server of this process. A forked process gets its own server."""
    return _of_process(os.getpid())
