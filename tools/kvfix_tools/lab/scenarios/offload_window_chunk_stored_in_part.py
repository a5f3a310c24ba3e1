"""A window begins within a chunk, and the OffloadingConnector stores the end of the chunk as if it were all of it.

Another request, whose window begins elsewhere, loads what was in the CPU memory before.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, evict, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(129)),
        run(),
        evict(100),
        # vLLM has 128 tokens, and of the window blocks 5 to 7: of blocks 4 and 5, a chunk, the second is stored
        admit("hit", prompt(130)),
        run(),
        admit("shorter", prompt(97)),  # of its window, blocks 3 to 5, blocks 4 and 5 count as stored
        run(),
        reset_prefix_cache(),
        admit("r", prompt(120), max_tokens=2),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="in KV group 1",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="offloading", windows=(40,), num_blocks=128, max_num_batched_tokens=512, extra={"blocks_per_chunk": 2}
    ),
    not_in_hooks=CONTENT,
)
