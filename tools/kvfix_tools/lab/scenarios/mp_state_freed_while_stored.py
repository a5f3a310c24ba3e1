"""A state is stored, two steps later vLLM has freed its block, and the request writes a later one to it."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = Scenario(
    schedule=[admit("r", prompt(256), max_tokens=2), run(), settle()],
    rule="LAB001",
    text="is stored under their key",
    wrong={"lmcache": ">=0.5.4"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    not_in_hooks="the block is used again when the next step is over, and the store may be done by then",
    options=Options(
        connector="mp",
        block_size=16,
        num_blocks=24,
        chunk_size=16,
        max_num_batched_tokens=16,
        states=True,
        separate_object_groups=True,
        delay=20,
    ),
)
