"""The process of one engine: `python -m kvfix_tools.roundtrip.engine_rounds JOB.json`; and the file of its loads.

Rounds of greedy requests: cold; the same with other first tokens, for which the answers must be others, or equal ones
prove nothing; others, which write over nearly all blocks; the first ones again. After each the prefix cache is emptied,
so that what the last round does not compute can only come from the external cache.

A hit is a promise: what the worker loads of it the connector writes down, a line for each load (engine_connector.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine
from kvfix_tools.roundtrip.real_engine import BLOCK, prompt

BLOCKS = 41  # the first one is vLLM's own
GENERATE = 24
ASKED = [prompt(200, seed) for seed in (1, 2, 3)]
OTHERS = [prompt(BLOCK * (BLOCKS - 1) // 2 - GENERATE - BLOCK, seed) for seed in (11, 12)]
CHANGED = [[*prompt(BLOCK, seed + 20), *one[BLOCK:]] for seed, one in enumerate(ASKED)]
ROUNDS = {"cold": ASKED, "changed": CHANGED, "others": OTHERS, "warm": ASKED}
#: Name in kv_connector_extra_config: the file of loads.
LOADS = "kvfix.loads"
#: Tokens that were loaded; blocks whose load failed.
KINDS = ("loaded", "failed")


def main(job: dict[str, Any]) -> None:
    engine = real_engine.make(
        Path(job["model"]), job["transfer"], job["dtype"], num_gpu_blocks_override=BLOCKS, max_model_len=1024
    )
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


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
