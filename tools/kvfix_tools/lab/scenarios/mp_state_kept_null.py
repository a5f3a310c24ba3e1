"""A step computes three blocks, and the last one has a state: in one object the chunks of the others are stored too."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(110)),
        run(),
        reset_prefix_cache(),
        admit("short", prompt(40)),
        run(),
        settle(),
    ],
    request="short",
    rule="LAB001",
    text="in KV group 1",
    wrong={"lmcache": ">=0.5.4"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    not_in_hooks=CONTENT,
    options=Options(connector="mp", block_size=16, chunk_size=16, max_num_batched_tokens=48, states=True),
)
