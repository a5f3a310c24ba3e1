"""A chunk of two blocks ends within a step: its state is null, and the server stores it, for the other block is one.

vLLM keeps a state at the end of each step, here at 48 and 96 tokens, in the third and the sixth block. The second chunk
has the third block and the fourth, which is null.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(110)),
        run(),
        reset_prefix_cache(),
        admit("short", prompt(70)),
        run(),
        settle(),
    ],
    request="short",
    rule="LAB001",
    text="in KV group 1",
    wrong={"lmcache": ">=0.5.4"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    hooks_rule="KVR014",
    options=Options(
        connector="mp",
        block_size=16,
        chunk_size=32,
        max_num_batched_tokens=48,
        states=True,
        separate_object_groups=True,
    ),
)
