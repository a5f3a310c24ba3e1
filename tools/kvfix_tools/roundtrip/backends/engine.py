"""`engine-mp`, `engine-v1`: a real vLLM engine, with and without LMCache: greedy outputs must be the same.

Rounds of greedy requests: cold; the same with other first tokens, for which the answers must be others, or equal ones
prove nothing; others, which write over nearly all blocks; the first ones again. After each the prefix cache is emptied,
so that what the last round does not compute can only come from the external cache.

That alone would prove nothing: in the last round tokens must have been promised and loaded, and no load must have
failed, for then vLLM computes them. A hit is a promise: what the worker loads of it the connector writes down, a line
for each load (engine_connector.py).

The process of one engine is `python -m kvfix_tools.roundtrip.backends.engine JOB.json`.
"""

from __future__ import annotations

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

from kvfix_tools.roundtrip import fixes, real_engine
from kvfix_tools.roundtrip.backends import Backend, vllm_offload
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Result
from kvfix_tools.roundtrip.real_engine import BLOCK, prompt

#: Seconds for one engine.
LIMIT = 600
CHUNK = 64
BLOCKS = 41  # the first one is vLLM's own
GENERATE = 24
ASKED = [prompt(200, seed) for seed in (1, 2, 3)]
OTHERS = [prompt(BLOCK * (BLOCKS - 1) // 2 - GENERATE - BLOCK, seed) for seed in (11, 12)]
CHANGED = [[*prompt(BLOCK, seed + 20), *one[BLOCK:]] for seed, one in enumerate(ASKED)]
ROUNDS = {"cold": ASKED, "changed": CHANGED, "others": OTHERS, "warm": ASKED}
#: Name in kv_connector_extra_config: the file of loads. Its lines: tokens that were loaded, blocks whose load failed.
LOADS = "kvfix.loads"
KINDS = ("loaded", "failed")
#: LMCache's connector as vLLM knows it, and the class of engine_connector.py that writes down its loads.
CONNECTORS = {"mp": ("LMCacheMPConnector", "MultiProcess"), "v1": ("LMCacheConnectorV1", "InProcess")}


def missing(device: torch.device) -> str | None:
    absent = [name for name in ("vllm", "lmcache") if not importlib.util.find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else None


def check(kind: str, device: torch.device, result: Result) -> Result:
    """Runs the engine with this connector, and once the one without."""
    plain = without_connector(device.type)
    with tempfile.TemporaryDirectory() as folder, connector(kind, Path(folder)) as transfer:
        ran = run_engine(Path(folder), transfer, device.type)
    wrong, warm = judge(plain, ran), ran["warm"]
    releases = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in (vllm_offload.distribution(), "lmcache")
    )
    stood_in = "; torch.cuda stood in for" if kind == "v1" and device.type == "cpu" else ""
    fixed = "with kvfix's fixes" if fixes.in_children() else "as released"
    operations = (
        f"{releases}, {CONNECTORS[kind][0]}, {fixed}{stood_in}: of {warm['asked']} prompt tokens {warm['hits']} "
        f"promised, {warm['loads']['loaded']} loaded"
    )
    return replace(result, verdict="failed" if wrong else "passed", reason=wrong or "", operations=operations)


def judge(plain: dict[str, Any], ran: dict[str, Any]) -> str | None:
    """What is wrong with an engine's answers, given those of one without connector; None if nothing is."""
    for name, other in plain.items():
        mine = ran[name]
        differ = sum(one != right for one, right in zip(mine["tokens"], other["tokens"], strict=True))
        if differ:
            return f"{name}: {differ} of {len(other['tokens'])} outputs differ from those without connector"
    alike = sum(one == other for one, other in zip(plain["cold"]["tokens"], plain["changed"]["tokens"], strict=True))
    if alike:
        return f"{alike} outputs are those of prompts with other first tokens: the model does not tell what is loaded"
    warm, loads = ran["warm"], ran["warm"]["loads"]
    if not warm["hits"]:
        return "warm: no token came from the external cache: nothing was checked"
    if loads["loaded"] < warm["hits"]:
        return f"warm: {warm['hits']} tokens were promised and {loads['loaded']} loaded: the others were computed"
    if loads["failed"]:
        return f"warm: the load of {loads['failed']} blocks failed: they were computed"
    if ran["cold"]["hits"]:
        return f"cold: {ran['cold']['hits']} tokens came from the external cache: it was not empty"
    return None


@functools.cache
def without_connector(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(Path(folder), None, device)


@contextlib.contextmanager
def connector(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """kv_transfer_config for LMCache's connector of this kind, as one that writes down its loads."""
    with contextlib.ExitStack() as stack:
        if kind == "v1":
            transfer = real_engine.in_process(CHUNK)
        else:
            try:
                server = real_engine.server(folder / "server.log", CHUNK, dict(os.environ))
                transfer = stack.enter_context(server)
            except FileNotFoundError as error:
                raise Refused(str(error)) from error
        extra = {**transfer["kv_connector_extra_config"], LOADS: str(folder / "loads")}
        module = "kvfix_tools.roundtrip.engine_connector"
        here = {"kv_connector": CONNECTORS[kind][1], "kv_connector_module_path": module}
        yield {**transfer, **here, "kv_connector_extra_config": extra}


def run_engine(folder: Path, transfer: dict[str, Any] | None, device: str) -> dict[str, Any]:
    """What the process of the engine has written. Raises RuntimeError with the end of its log if it dies or hangs."""
    ended = start_engine(folder, transfer, device)
    if ended.code != 0 or ended.answer is None:
        code = f"none after {LIMIT} s" if ended.code is None else ended.code
        raise RuntimeError(f"the engine ended with {code}: {cause(ended.log)}")
    return dict(ended.answer)


def start_engine(folder: Path, transfer: dict[str, Any] | None, device: str) -> real_engine.Ended:
    """Run the engine's process to its end."""
    engine = real_engine.ON_CUDA if device == "cuda" else {}
    job = {"loads": str(folder / "loads"), "transfer": transfer, "engine": engine}
    here = str(Path(__file__).parents[3])  # vLLM's processes import the connectors from there, and so does this one
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return real_engine.run(["-m", __spec__.name], job, folder, {**os.environ, "PYTHONPATH": path}, LIMIT)


def cause(log: str) -> str:
    """Of a log: the error that came first, or its end."""
    lines = [line for line in log.splitlines() if "WARNING" not in line and "EngineDeadError" not in line]
    first = next((found for line in lines if (found := re.search(r"\b\w*(Error|Exception)\b: .+", line))), None)
    return first[0][:500] if first else f"... {log[-1000:]}"


def ask(job: dict[str, Any]) -> None:
    """In the process of the engine: the rounds, and what came of each."""
    engine = real_engine.make(
        Path(job["model"]), job["transfer"], num_gpu_blocks_override=BLOCKS, max_model_len=1024,
        distributed_executor_backend="uni",  # as on one GPU; for the CPU vLLM would start one more process
        **job["engine"],
    )  # fmt: skip
    answer = {}
    for name, prompts in ROUNDS.items():
        hits, before = hit_tokens(engine), loads(Path(job["loads"]))
        answer[name] = {
            "tokens": real_engine.generate(engine, [(one, GENERATE) for one in prompts]),
            "hits": hit_tokens(engine) - hits,
            "loads": {kind: count - before[kind] for kind, count in loads(Path(job["loads"])).items()},
            "asked": sum(map(len, prompts)),
        }
    Path(job["out"]).write_text(json.dumps(answer))


def hit_tokens(engine: Any) -> int:
    """That the scheduler was granted from the external cache so far."""
    return real_engine.counter(engine, "vllm:external_prefix_cache_hits")


def loads(file: Path) -> dict[str, int]:
    """{kind: how many so far}"""
    lines = [line.partition("=") for line in file.read_text().split()] if file.exists() else []
    return {kind: sum(int(count) for of, _, count in lines if of == kind) for kind in KINDS}


def tokens_to_load(request: Any) -> int:
    """That a request of the connector's metadata has the worker load."""
    if hasattr(request, "op"):  # multi-process
        skipped = getattr(request.op, "skip_first_n_tokens", 0)
        return int(request.op.end - request.op.start - skipped) if request.direction == "RETRIEVE" else 0
    spec = request.load_spec
    return int(spec.lmcache_cached_tokens - spec.vllm_cached_tokens) if spec is not None and spec.can_load else 0


def _no_cells(check: CellCheck) -> Any:
    raise Refused("an engine has no cells")


BACKENDS = tuple(
    Backend(
        f"engine-{kind}", f"a vLLM engine with {name}", _no_cells, missing, "engine",
        whole=functools.partial(check, kind),
    )
    for kind, (name, _) in CONNECTORS.items()
)  # fmt: skip

if __name__ == "__main__":
    ask(json.loads(Path(sys.argv[1]).read_text()))
