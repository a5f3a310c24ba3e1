"""The whole prompt is hit, and asked a second time the connector promises all of it: nothing is left to compute.

200 tokens, all in LMCache. The first answer is 199, since the last token has to be computed for its logits; there are
too few blocks; the second is 200, and vLLM asserts that there are new tokens (scheduler.py 0.32.0:1170).
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, reset_prefix_cache, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(200)),
        run(),
        reset_prefix_cache(),
        keep_blocks(0),
        admit("r", prompt(200), max_tokens=2),
        step(),  # match(0) by a lookup
        step(),  # match(0) from the lookup cache
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR001",
    wrong={"lmcache": "==0.3.10"},
    options=Options(block_size=8, num_blocks=40, chunk_size=40, max_num_batched_tokens=256),
)
