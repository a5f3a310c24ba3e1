"""vLLM has a prefix that LMCache has evicted: null blocks of a window are stored, and a later, shorter hit reads them.

After the prefix hit of `r` its list of blocks in the window's KV group begins with null block 0.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, evict, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(256)),
        run(),
        evict(4),
        admit("r", prompt(512)),
        run(),
        reset_prefix_cache(),
        admit("short", prompt(100)),
        run(),
        settle(),
    ],
    request="short",
    rule="LAB001",
    text="the step reads token",
    wrong={"lmcache": ">=0.4.7"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    hooks_rule="KVR014",
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, windows=(64,)),
)
