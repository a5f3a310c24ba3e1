"""The process of one engine: `python -m kvfix_tools.roundtrip.engine_child JOB.json`. It writes the job's `out`.

Rounds of greedy requests: cold; the same with other first tokens, for which the answers must be others, or equal ones
prove nothing; others, which write over nearly all blocks; the first ones again. After each the prefix cache is emptied,
so that what the last round does not compute can only come from the external cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import engine_loads, engines
from kvfix_tools.roundtrip.engines import BLOCK, prompt

BLOCKS = 41  # the first one is vLLM's own
GENERATE = 24
ASKED = [prompt(200, seed) for seed in (1, 2, 3)]
OTHERS = [prompt(BLOCK * (BLOCKS - 1) // 2 - GENERATE - BLOCK, seed) for seed in (11, 12)]
CHANGED = [[*prompt(BLOCK, seed + 20), *one[BLOCK:]] for seed, one in enumerate(ASKED)]
ROUNDS = {"cold": ASKED, "changed": CHANGED, "others": OTHERS, "warm": ASKED}


def main(job: dict[str, Any]) -> None:
    engine = engines.make(
        Path(job["model"]), job["transfer"], job["dtype"], num_gpu_blocks_override=BLOCKS, max_model_len=1024
    )
    answer = {}
    for name, prompts in ROUNDS.items():
        hits, loads = hit(engine), engine_loads.read(job["loads"])
        outputs = engine.generate(
            [{"prompt_token_ids": one} for one in prompts], engines.greedy(GENERATE), use_tqdm=False
        )
        answer[name] = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "hits": hit(engine) - hits,
            "loads": {what: count - loads[what] for what, count in engine_loads.read(job["loads"]).items()},
            "asked": sum(map(len, prompts)),
        }
        engine.reset_prefix_cache()
    Path(job["out"]).write_text(json.dumps(answer))


def hit(engine: Any) -> int:
    """Tokens that the scheduler was granted from the external cache so far."""
    found = [metric for metric in engine.get_metrics() if metric.name == "vllm:external_prefix_cache_hits"]
    return sum(int(metric.value) for metric in found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
