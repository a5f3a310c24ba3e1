"""`engine-mp`, `engine-v1`: a real vLLM engine, with and without LMCache: greedy outputs must be the same.

That alone would prove nothing: the last round must have hits, and other requests have written over nearly all blocks
before it, so an engine that loads nothing, or something else, answers something else (engine_child.py has the rounds).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip.backend import Backend
from kvfix_tools.roundtrip.trip import Refused, Result, Trip

#: Seconds for one engine, and for the server to be there.
LIMIT, SERVER_LIMIT = 600, 180
CHUNK = 64
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # else scheduler and worker hash differently, and nothing is ever found
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
READY = "LMCache cache server is running"


def missing(device: torch.device) -> str | None:
    absent = [name for name in ("vllm", "lmcache") if not importlib.util.find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else None


def missing_v1(device: torch.device) -> str | None:
    return missing(device) or (
        "LMCache has no in-process connector for the CPU; vLLM's worker would go on without"
        if device.type == "cpu"
        else None
    )


def judge(plain: dict[str, Any], ran: dict[str, Any]) -> str | None:
    """What is wrong with an engine's answers, beside those of one without connector; None if nothing is."""
    for name, other in plain.items():
        mine = ran[name]
        differ = sum(one != right for one, right in zip(mine["tokens"], other["tokens"], strict=True))
        if differ:
            return f"{name}: {differ} of {len(other['tokens'])} outputs differ from those without connector"
    if not ran["warm"]["hits"]:
        return "warm: no token came from the external cache: nothing was checked"
    if ran["cold"]["hits"]:
        return f"cold: {ran['cold']['hits']} tokens came from the external cache: it was not empty"
    return None


def check(kind: str, device: torch.device, result: Result) -> Result:
    plain = without_connector(device.type)
    with tempfile.TemporaryDirectory() as folder, CONNECTORS[kind](Path(folder)) as transfer:
        ran = run_engine(Path(folder), transfer, device.type)
    wrong, warm = judge(plain, ran), ran["warm"]
    releases = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (vllm_name(), "lmcache"))
    operations = f"{releases}, {transfer['kv_connector']}: {warm['hits']} of {warm['asked']} prompt tokens loaded"
    return replace(result, verdict="failed" if wrong else "passed", reason=wrong or "", operations=operations)


def vllm_name() -> str:
    return importlib.metadata.packages_distributions()["vllm"][0]


@functools.cache
def without_connector(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(Path(folder), None, device)


def run_engine(folder: Path, transfer: dict[str, Any] | None, device: str) -> dict[str, Any]:
    """What the child has written. Raises RuntimeError with the end of its log if it dies or hangs."""
    job = {
        "model": str(folder / "model"),
        "out": str(folder / "out.json"),
        "transfer": transfer,
        "dtype": "float32" if device == "cpu" else "bfloat16",
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "kvfix_tools.roundtrip.engine_child", str(folder / "job.json")]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1"} if device == "cpu" else {}
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT, **own}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code: object = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT} s"
        finally:  # an engine that fails to start leaves its processes behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        said = log.read()
    out = folder / "out.json"
    if code != 0 or not out.exists():
        raise RuntimeError(f"the engine ended with {code}: ... {said[-1500:]}")
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[dict[str, Any]]:
    settings = {
        "chunk_size": CHUNK,
        "local_cpu": True,
        "max_local_cpu_size": 1.0,
        "save_unfull_chunk": False,
        # The default hashes None, whose hash is an address before Python 3.12: scheduler and worker never agree.
        "pre_caching_hash_algorithm": "sha256_cbor",
    }
    extra = {f"lmcache.{name}": value for name, value in settings.items()}
    yield {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[dict[str, Any]]:
    """An `lmcache server`, and the connector for it."""
    program = shutil.which("lmcache", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise Refused("the program lmcache is not on PATH")
    port, http = free_port(), free_port()
    command = [program, "server", "--port", str(port), "--http-port", str(http), "--chunk-size", str(CHUNK)]
    command += ["--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [*command, "--disable-observability"], env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
        )
    try:
        wait_for(process, folder / "server.log")
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server says that it is there."""
    for _ in range(SERVER_LIMIT * 2):
        if READY in log.read_text():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
            break
    raise RuntimeError(f"the lmcache server is not there: ... {log.read_text()[-1500:]}")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


CONNECTORS: dict[str, Callable[[Path], Any]] = {"mp": server, "v1": in_process}


def _no_cells(trip: Trip) -> Any:
    raise Refused("an engine has no cells")


BACKENDS = (
    Backend(
        "engine-mp", "a vLLM engine with LMCacheMPConnector and a server", _no_cells, missing, "engine",
        whole=functools.partial(check, "mp"),
    ),
    Backend(
        "engine-v1", "a vLLM engine with LMCacheConnectorV1", _no_cells, missing_v1, "engine",
        whole=functools.partial(check, "v1"),
    ),
)  # fmt: skip
