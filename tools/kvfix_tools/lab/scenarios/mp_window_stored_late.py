"""After a failed load the store is late by the prefix hit: the blocks of the window that it reads are others' by then.

vLLM has 64 tokens, the cache 128; the load fails. The tracker then counts from 0, and stores each chunk 64 tokens after
it was computed.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, lose_loads, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        admit("short", prompt(65)),
        run(),
        stored_elsewhere(prompt(128)),
        admit("r", prompt(400), max_tokens=2),
        step(2),
        lose_loads(),  # the load was in flight
        run(),
        settle(),
    ],
    rule="LAB001",
    text="is stored under their key",
    wrong={"lmcache": ">=0.5.6"},
    needs={"lmcache": ">=0.5.6", "vllm": ">=0.32"},
    hooks_rule="KVR014",
    options=Options(
        connector="mp", block_size=16, num_blocks=32, chunk_size=64, windows=(64,), max_num_batched_tokens=16
    ),
)
