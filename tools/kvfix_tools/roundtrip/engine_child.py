"""The process of one engine: `python -m kvfix_tools.roundtrip.engine_child JOB.json`. It writes the job's `out`.

Three rounds of greedy requests: cold; others, which write over nearly all blocks; the first ones again. After each the
prefix cache is emptied, so that what the last round does not compute can only come from the external cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: A model without weights: they are made from the seed.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
BLOCK, BLOCKS = 32, 41  # the first block is vLLM's own
GENERATE = 24


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed * 101 + position * 7 + position // 97) % 509 + 1 for position in range(tokens)]


ASKED = [prompt(200, seed) for seed in (1, 2, 3)]
OTHERS = [prompt(BLOCK * (BLOCKS - 1) // 2 - GENERATE - BLOCK, seed) for seed in (11, 12)]
ROUNDS = {"cold": ASKED, "others": OTHERS, "warm": ASKED}


def main(job: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    folder = Path(job["model"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": job["dtype"]}))
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        seed=0,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=1024,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**job["transfer"]) if job["transfer"] else None,
    )
    greedy = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=GENERATE)
    answer = {}
    for name, prompts in ROUNDS.items():
        before = hits(engine)
        outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], greedy, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answer[name] = {"tokens": tokens, "hits": hits(engine) - before, "asked": sum(map(len, prompts))}
        engine.reset_prefix_cache()
    Path(job["out"]).write_text(json.dumps(answer))


def hits(engine: Any) -> int:
    """Tokens that the scheduler was granted from the external cache so far."""
    found = [metric for metric in engine.get_metrics() if metric.name == "vllm:external_prefix_cache_hits"]
    return sum(int(metric.value) for metric in found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
