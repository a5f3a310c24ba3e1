"""Compare answers of vLLM engines with and without LMCache: `engine-mp` and `engine-v1` in docs/roundtrip.md."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.backends import Backend, vllm_offload
from kvfix_tools.roundtrip.cell_check import Refused, Result, Transfer
from kvfix_tools.roundtrip.real_engine import BLOCK, prompt

LIMIT = 600  # time limit of one engine in seconds
CHUNK = 64
BLOCKS = 41  # vLLM keeps the first block for itself
GENERATE = 24
ASKED = [prompt(200, seed) for seed in (1, 2, 3)]
OTHERS = [prompt(BLOCK * (BLOCKS - 1) // 2 - GENERATE - BLOCK, seed) for seed in (11, 12)]
CHANGED = [[*prompt(BLOCK, seed + 20), *one[BLOCK:]] for seed, one in enumerate(ASKED)]
ROUNDS = {"cold": ASKED, "changed": CHANGED, "others": OTHERS, "warm": ASKED}
#: Key in kv_connector_extra_config for the path of a log file. The connector appends lines: `loaded=N` for N loaded
#: tokens, `failed=N` for N blocks whose load failed.
LOADS = "kvfix.loads"
KINDS = ("loaded", "failed")
#: {kind: (LMCache's connector in vLLM, its subclass in engine_connector.py that logs the loads)}
CONNECTORS = {"mp": ("LMCacheMPConnector", "MultiProcess"), "v1": ("LMCacheConnectorV1", "InProcess")}


def missing(device: torch.device) -> str | None:
    absent = [name for name in ("vllm", "lmcache") if not importlib.util.find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else None


def check(kind: str, device: torch.device, result: Result) -> Result:
    """Run an engine with this connector. Compare the answers with the answers of an engine without a connector."""
    plain = without_connector(device.type)
    with tempfile.TemporaryDirectory() as folder, connector(kind, Path(folder)) as transfer:
        ran = run_engine(Path(folder), transfer, device.type)
    wrong, warm = judge(plain, ran), ran["warm"]
    releases = f"vllm {vllm_offload.version()}, lmcache {importlib.metadata.version('lmcache')}"
    stood_in = "; torch.cuda is a stand-in" if kind == "v1" and device.type == "cpu" else ""
    fixed = "as released" if os.environ.get("KVFIX", "off") == "off" else "with kvfix's fixes"
    operations = (
        f"{releases}, {CONNECTORS[kind][0]}, {fixed}{stood_in}: of {warm['asked']} prompt tokens {warm['hits']} were "
        f"promised and {warm['loaded']} loaded"
    )
    return replace(result, verdict="failed" if wrong else "passed", reason=wrong or "", operations=operations)


def judge(plain: dict[str, Any], ran: dict[str, Any]) -> str | None:
    """Compare `ran` (engine with a connector) with `plain` (engine without one). Return the first error, or None."""
    for name in ROUNDS:
        mine, other = ran[name], plain[name]
        if differ := sum(one != right for one, right in zip(mine["tokens"], other["tokens"], strict=True)):
            return f"{name}: {differ} of {len(other['tokens'])} outputs differ from outputs without a connector"
    alike = sum(one == other for one, other in zip(plain["cold"]["tokens"], plain["changed"]["tokens"], strict=True))
    if alike:
        same = f"{alike} outputs do not change if kvfix changes the first prompt tokens"
        return f"{same}, so the outputs of this model do not reveal wrong KV"
    warm = ran["warm"]
    if not warm["hits"]:
        return "warm: no token came from the external cache, so nothing was checked"
    if warm["loaded"] < warm["hits"]:
        return f"warm: {warm['hits']} tokens were promised, but only {warm['loaded']} loaded"
    if warm["failed"]:
        return f"warm: the load of {warm['failed']} blocks failed, so vLLM computed them"
    if ran["cold"]["hits"]:
        return f"cold: {ran['cold']['hits']} tokens came from the external cache, which must be empty in this round"
    return f"kvfix reports a violation: {ran['violations'][0]}" if ran["violations"] else None


@functools.cache
def without_connector(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(Path(folder), None, device)


@contextlib.contextmanager
def connector(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield kv_transfer_config for the subclass of LMCache's connector that logs the loads. kind: key of CONNECTORS."""
    with contextlib.ExitStack() as stack:
        transfer = real_engine.in_process(CHUNK)
        if kind == "mp":
            try:
                transfer = stack.enter_context(real_engine.server(folder / "server.log", CHUNK, dict(os.environ)))
            except FileNotFoundError as error:
                raise Refused(str(error)) from error
        extra = {**transfer["kv_connector_extra_config"], LOADS: str(folder / "loads")}
        module = "kvfix_tools.roundtrip.engine_connector"
        here = {"kv_connector": CONNECTORS[kind][1], "kv_connector_module_path": module}
        yield {**transfer, **here, "kv_connector_extra_config": extra}


def run_engine(folder: Path, transfer: dict[str, Any] | None, device: str) -> dict[str, Any]:
    """Run an engine. Return the engine's answers and logged violations. Raise RuntimeError if the run fails."""
    engine = real_engine.ON_CUDA if device == "cuda" else {}
    job = {"loads": str(folder / "loads"), "transfer": transfer, "engine": engine}
    here = str(Path(__file__).parents[3])  # the folder from which vLLM's processes import kvfix_tools
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = real_engine.run(["-m", __spec__.name], job, folder, {**os.environ, "PYTHONPATH": path}, LIMIT)
    if ended.code != 0 or ended.answer is None:
        how = f"did not end within {LIMIT} s" if ended.code is None else f"ended with exit code {ended.code}"
        raise RuntimeError(f"the engine {how}: {cause(ended.log)}")
    return {**ended.answer, "violations": re.findall(r"SUMMARY: kvfix (.*)$", ended.log, re.MULTILINE)}


def cause(log: str) -> str:
    lines = [line for line in log.splitlines() if "WARNING" not in line and "EngineDeadError" not in line]
    first = next((found for line in lines if (found := re.search(r"\b\w*(Error|Exception)\b: .+", line))), None)
    return first[0][:500] if first else f"... {log[-1000:]}"


def ask(job: dict[str, Any]) -> None:
    engine = real_engine.make(
        Path(job["model"]), job["transfer"], num_gpu_blocks_override=BLOCKS, max_model_len=1024,
        distributed_executor_backend="uni",  # the worker runs in the engine's process, as on one GPU
        **job["engine"],
    )  # fmt: skip
    answer = {}

    def counts() -> dict[str, int]:
        return {"hits": real_engine.counter(engine, "vllm:external_prefix_cache_hits"), **loads(Path(job["loads"]))}

    for name, prompts in ROUNDS.items():
        before = counts()
        tokens = real_engine.generate(engine, [(one, GENERATE) for one in prompts])
        more = {kind: count - before[kind] for kind, count in counts().items()}
        answer[name] = {"tokens": tokens, "asked": sum(map(len, prompts)), **more}
    Path(job["out"]).write_text(json.dumps(answer))


def loads(file: Path) -> dict[str, int]:
    lines = [line.partition("=") for line in file.read_text().split()] if file.exists() else []
    return {kind: sum(int(count) for of, _, count in lines if of == kind) for kind in KINDS}


def tokens_to_load(request: Any) -> int:
    """Return how many tokens the worker must load for one request of the connector's metadata."""
    if hasattr(request, "op"):  # metadata of LMCacheMPConnector
        skipped = getattr(request.op, "skip_first_n_tokens", 0)
        return int(request.op.end - request.op.start - skipped) if request.direction == "RETRIEVE" else 0
    spec = request.load_spec
    return int(spec.lmcache_cached_tokens - spec.vllm_cached_tokens) if spec is not None and spec.can_load else 0


def _backend(kind: str) -> Backend:
    summary, whole = f"a vLLM engine with {CONNECTORS[kind][0]}", functools.partial(check, kind)
    return Backend(f"engine-{kind}", summary, lambda _: Transfer(), missing, "engine", whole=whole)


BACKENDS = tuple(map(_backend, CONNECTORS))

if __name__ == "__main__":
    ask(json.loads(Path(sys.argv[1]).read_text()))
