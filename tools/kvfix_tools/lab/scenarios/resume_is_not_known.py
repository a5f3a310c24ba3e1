"""A preempted request is promised what LMCache has, no load is started, and it goes on with KV that is not there."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=8),
        step(),
        preempt("r"),
        keep_blocks(10),  # 160 tokens stay in the prefix cache, fewer than the 256 that LMCache has
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR006",
    wrong={"lmcache": ">=0.3.9,<0.3.10"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
