"""Measure `vllm serve` with LMCache on the CPU. Eight clients send requests at the same time.

vLLM preempts requests, because prompts are random, blocks are few, and prefill is chunked. A server in mode `strict`
must answer every request. Then the clients ask three servers in turn: without kvfix, in mode `fix`, in mode `check`. A
step takes 8 ms with the small model, and 10 to 50 ms with a real model. kvfix's time per step does not depend on the
model, so kvfix's share is smaller with a real model. The scheduler and the worker are in one process, as with one GPU.

The four servers take nine minutes on two otherwise idle cores. Each server computes with one thread. Several threads
would spin while they wait for one another, and the bench would mostly measure these waits.
"""

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import permutations
from math import sqrt
from pathlib import Path
from statistics import geometric_mean, median, stdev

from kvfix_tools.diagnose.diagnosis import diagnosed
from kvfix_tools.roundtrip.real_engine import MODEL, in_process
from tests.bench import Row
from tests.engine.vllm_server import Server, ask_all

#: Number of prompts for the server in mode `strict`.
PROMPTS = 96
#: SHORT: prompts in one run. TURNS: measured runs of each server. Before these runs, one run warms the server up.
#: The speed of a shared host changes by a third within seconds. So the servers take turns in many short runs.
SHORT, TURNS = 16, 60
#: INPUT: tokens of a prompt. OUTPUT: tokens of an answer. The 32 free blocks of 32 tokens hold only two requests.
INPUT, OUTPUT = 300, 40
SIZES = {"num-gpu-blocks-override": 33, "max-num-batched-tokens": 352}

PREEMPTIONS = "vllm:num_preemptions_total"
#: For each mode, the maximum percentage of the requests' time that kvfix may take.
BUDGET = {"fix": 1, "check": 3}
#: The servers take turns in all orders, because a server that has just run is faster than a server that has rested.
ORDERS = list(permutations(("", *BUDGET)))


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="kvfix-bench-") as place, ExitStack() as stack:
        folder = Path(place)
        (folder / "metrics").mkdir()
        with running(folder, "strict", PROMETHEUS_MULTIPROC_DIR=str(folder / "metrics")) as server:
            answered, _ = ask(server, PROMPTS, seed=0)
            assert server.metric("kvfix_fixes", code="KVF013", verdict="applied") > 0
            context = f"{server.metric(PREEMPTIONS):.0f} preemptions, {PROMPTS} requests"
        yield Row("vllm serve in strict, succeeded", answered, "requests", context, at_least=PROMPTS)
        times = {"KVFIX_TEST_TIMES": "1"}
        servers = {mode: stack.enter_context(running(folder, mode, **(times if mode else {}))) for mode in ORDERS[0]}
        took: dict[str, list[float]] = {mode: [] for mode in servers}
        before = dict.fromkeys(BUDGET, 0.0)
        for turn in range(-1, TURNS):
            for mode in ORDERS[turn % len(ORDERS)]:
                answered, seconds = ask(servers[mode], SHORT, seed=turn + 1)
                assert answered == SHORT
                if turn >= 0:
                    took[mode].append(seconds)
            if turn < 0:
                before = {mode: own_seconds(servers[mode]) for mode in BUDGET}
        for server in servers.values():
            assert server.metric(PREEMPTIONS) > 0, "vLLM preempted no request, so this run does not test preemption"
        speed = f"{SHORT / median(took['']):.1f} requests/s without kvfix"
        for mode, percent in BUDGET.items():
            own, all_of_it = own_seconds(servers[mode]) - before[mode], sum(took[mode])
            context = f"{own:.2f} s of {all_of_it:.0f} s in which requests ran"
            yield Row(f"vllm serve in {mode}, kvfix itself", 100 * own / all_of_it, "%", context, at_most=percent)
            pairs = zip(in_all_orders(took[""]), in_all_orders(took[mode]), strict=True)
            ratios = [plain / fixed for plain, fixed in pairs]
            error = stdev(ratios) / sqrt(len(ratios))
            context = f"standard error {error:.4f}; {TURNS} runs of each, {SHORT} requests; {speed}"
            least = round(1 - percent / 100 - 2 * error, 4)
            yield Row(f"vllm serve in {mode}, throughput", geometric_mean(ratios), "of it", context, at_least=least)


def ask(server: Server, prompts: int, seed: int) -> tuple[int, float]:
    """Return the number of answered requests, and the seconds for all requests together."""
    drawn = random.Random(seed)
    requests = [(drawn.choices(range(MODEL["vocab_size"]), k=INPUT), OUTPUT) for _ in range(prompts)]
    start = time.perf_counter()
    answers = ask_all(server.url, requests)
    return prompts - answers.count(None), time.perf_counter() - start


def own_seconds(server: Server) -> float:
    """Return the seconds that all of kvfix's wrappers in the server's EngineCore have taken."""
    lines = [json.loads(line) for file in server.folder.glob("report.*") for line in file.read_text().splitlines()]
    return max((line["seconds"] for line in lines if line["what"] == "own"), default=0.0)


def in_all_orders(runs: list[float]) -> list[float]:
    return [sum(runs[at : at + len(ORDERS)]) for at in range(0, len(runs), len(ORDERS))]


@contextmanager
def running(folder: Path, mode: str, **settings: str) -> Iterator[Server]:
    """Yield a running server with kvfix in this mode ("": without kvfix). settings: environment variables."""
    server = Server(
        folder / (mode or "plain"), in_process(64), mode, ["--no-scheduler-reserve-full-isl"], subprocess.Popen,
        KVFIX_TEST_REAL_CONNECTOR="", **settings,
    )  # fmt: skip
    with server.running(**SIZES):
        yield server
        assert "SUMMARY" not in server.log.read_text()
        assert diagnosed(server.log.read_bytes()).findings == []
