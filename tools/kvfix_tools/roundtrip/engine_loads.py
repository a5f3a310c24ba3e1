"""What the worker of an engine loads from the external cache, written down by its connector: a line for each load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Name in kv_connector_extra_config: the file.
FILE = "kvfix.loads"
#: Tokens that were loaded; blocks whose load failed.
KINDS = ("loaded", "failed")


def due(request: Any) -> int:
    """Tokens that a request of the metadata has the worker load."""
    if hasattr(request, "op"):  # multi-process
        skipped = getattr(request.op, "skip_first_n_tokens", 0)
        return int(request.op.end - request.op.start - skipped) if request.direction == "RETRIEVE" else 0
    spec = request.load_spec
    return int(spec.lmcache_cached_tokens - spec.vllm_cached_tokens) if spec is not None and spec.can_load else 0


def say(file: str, what: str, count: int) -> None:
    with open(file, "a") as said:
        said.write(f"{what}={count}\n")


def read(file: str) -> dict[str, int]:
    """{what: how many so far}"""
    lines = Path(file).read_text().split() if Path(file).exists() else []
    said = [line.partition("=") for line in lines]
    return {what: sum(int(count) for kind, _, count in said if kind == what) for what in KINDS}
