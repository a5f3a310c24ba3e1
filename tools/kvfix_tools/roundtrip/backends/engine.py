"""`engine-mp`, `engine-v1`: a real vLLM engine, with and without LMCache: greedy outputs must be the same.

That alone would prove nothing: in the last round tokens must have been promised and loaded, and no load must have
failed, for then vLLM computes them; other requests have written over nearly all blocks before it; and the model gives
other answers to prompts that begin otherwise. So an engine that loads something else answers something else
(engine_rounds.py has the rounds).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvfix_tools.roundtrip import apply_fixes, engine_rounds, real_engine
from kvfix_tools.roundtrip.backends import Backend, vllm_offload
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Result

#: Seconds for one engine.
LIMIT = 600
CHUNK = 64
CONNECTORS = "kvfix_tools.roundtrip.engine_connector"


def missing(device: torch.device) -> str | None:
    absent = [name for name in ("vllm", "lmcache") if not importlib.util.find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else None


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


def check(kind: str, device: torch.device, result: Result) -> Result:
    plain = without_connector(device.type)
    with tempfile.TemporaryDirectory() as folder, TRANSFERS[kind](Path(folder)) as transfer:
        ran = run_engine(Path(folder), transfer, device.type)
    wrong, warm = judge(plain, ran), ran["warm"]
    releases = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in (vllm_offload.distribution(), "lmcache")
    )
    stood_in = "; torch.cuda stood in for" if kind == "v1" and device.type == "cpu" else ""
    fixed = "with kvfix's fixes" if apply_fixes.in_children() else "as released"
    operations = (
        f"{releases}, {NAMES[kind]}, {fixed}{stood_in}: of {warm['asked']} prompt tokens {warm['hits']} promised, "
        f"{warm['loads']['loaded']} loaded"
    )
    return replace(result, verdict="failed" if wrong else "passed", reason=wrong or "", operations=operations)


@functools.cache
def without_connector(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_engine(Path(folder), None, device)


def run_engine(folder: Path, transfer: dict[str, Any] | None, device: str) -> dict[str, Any]:
    """What the child has written. Raises RuntimeError with the end of its log if it dies or hangs."""
    job = {
        "loads": str(folder / "loads"),
        "transfer": transfer,
        "dtype": "float32" if device == "cpu" else "bfloat16",
    }
    program = ["-m", "kvfix_tools.roundtrip.engine_rounds"]
    here = str(Path(__file__).parents[3])  # vLLM's processes import the connectors from there, and so does the child
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = real_engine.run(program, job, folder, {**os.environ, "PYTHONPATH": path}, LIMIT)
    if ended.code != 0 or ended.answer is None:
        code = f"none after {LIMIT} s" if ended.code is None else ended.code
        raise RuntimeError(f"the engine ended with {code}: {cause(ended.log)}")
    return dict(ended.answer)


def cause(log: str) -> str:
    """Of a log: the error that came first, or its end."""
    lines = [line for line in log.splitlines() if "WARNING" not in line and "EngineDeadError" not in line]
    first = next((found for line in lines if (found := re.search(r"\b\w*(Error|Exception)\b: .+", line))), None)
    return first[0][:500] if first else f"... {log[-1000:]}"


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[dict[str, Any]]:
    yield with_loads(folder, real_engine.in_process(CHUNK), "InProcess")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        with real_engine.server(folder / "server.log", CHUNK, dict(os.environ)) as transfer:
            yield with_loads(folder, transfer, "MultiProcess")
    except FileNotFoundError as error:
        raise Refused(str(error)) from error


def with_loads(folder: Path, transfer: dict[str, Any], name: str) -> dict[str, Any]:
    """The same connector, as one that writes down its loads."""
    extra = {**transfer["kv_connector_extra_config"], engine_rounds.LOADS: str(folder / "loads")}
    here = {"kv_connector": name, "kv_connector_module_path": CONNECTORS, "kv_connector_extra_config": extra}
    return {**transfer, **here}


TRANSFERS: dict[str, Callable[[Path], Any]] = {"mp": server, "v1": in_process}
NAMES = {"mp": "LMCacheMPConnector", "v1": "LMCacheConnectorV1"}


def _no_cells(check: CellCheck) -> Any:
    raise Refused("an engine has no cells")


BACKENDS = tuple(
    Backend(
        f"engine-{kind}", f"a vLLM engine with {name}", _no_cells, missing, "engine",
        whole=functools.partial(check, kind),
    )
    for kind, name in NAMES.items()
)  # fmt: skip
