"""LMCache loads into blocks of an ended request that the OffloadingConnector still copies: it stores other KV.

A MultiConnector of both. For a load between steps the blocks are allocated before the request is in any step, and the
OffloadingConnector waits only for copies of blocks that are allocated in a step.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, keep_blocks, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        stored_elsewhere(prompt(256, seed=1)),
        keep_blocks(20),
        admit("a", prompt(256)),  # LMCache has it, and stores nothing that would keep the blocks
        admit("r", prompt(256, seed=1)),  # its load is granted the blocks of "a", when that has ended
        run(),
        settle(),
    ],
    rule="LAB001",
    text="the OffloadingConnector stores other KV",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mp", offloading="last", delay=3, max_num_batched_tokens=128, prefix_caching=False),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    request="a",
    not_in_hooks=CONTENT,
)
