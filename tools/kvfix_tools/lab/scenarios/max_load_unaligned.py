"""A capped load on top of a prefix hit that is no multiple of the chunk: promise and LoadSpec differ.

max_tokens_per_load 1024, 80 tokens in vLLM: the promise is 1,024, the LoadSpec ends at 1,024, and
`update_state_after_alloc` finds 1,024 promised where 1,024 - 80 is due. No preemption is needed.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(1500)),
        run(),
        reset_prefix_cache(),
        admit("short", prompt(80)),
        run(),
        admit("r", prompt(1500), max_tokens=2),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens in vllm)",
    wrong={"lmcache": ">=0.4.7"},
    options=Options(num_blocks=120, chunk_size=256, max_num_batched_tokens=2048, lmcache={"max_tokens_per_load": 1024}),
    needs={"lmcache": ">=0.4.7"},
)
