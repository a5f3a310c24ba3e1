"""The report of LMCache issue 2158: 256 are promised where vLLM has computed 336, and EngineCore dies.

A prompt of 10,009 tokens, block 16, chunk 256. One step computes 336 of them, and LMCache stores one chunk. One more
token is computed, so that the 21 blocks of the 336 are whole and stay in vLLM's prefix cache when another request takes
the long one's blocks. While there are too few free blocks to take it back, vLLM asks the connector on every step: the
first answer is made by a lookup and is 0, the next come from the lookup cache. Then the blocks come free.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, budget, prompt, run, settle, step

LONG = "long"

SCENARIO = Scenario(
    schedule=[
        # 637 of the 659 usable blocks, full after its third token; six tokens long
        admit("other", prompt(10190, seed=1), max_tokens=6),
        step(),
        admit(LONG, prompt(10009, seed=2), max_tokens=2),
        budget(1 + 336),
        step(),
        budget(1 + 1),
        step(),  # the 22nd block of the long one: none is free now
        budget(16384),
        step(),  # the other one needs a block: the long one is preempted
        step(),  # match(336) by a lookup; too few blocks
        step(),  # match(336) from the lookup cache; too few blocks; the other one finishes
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full lmcache hits "
    f"subtracts last token to recalculate logits) for request {LONG}",
    request=LONG,
    wrong={"lmcache": "==0.3.10"},
    options=Options(
        block_size=16,
        num_blocks=660,
        chunk_size=256,
        max_num_batched_tokens=16384,
        max_model_len=12288,
        reserve_full_isl=False,
    ),
)
