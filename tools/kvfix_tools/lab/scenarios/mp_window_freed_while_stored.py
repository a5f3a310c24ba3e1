"""A store is in flight, the window moves on, others write to its blocks: their KV is stored under its keys."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(256), max_tokens=20),
        step(6),  # computed and handed over; the server copies some steps later
        step(),
        keep_blocks(0),  # others take the blocks that are in the window no more, and write to them
        step(3),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="is stored under their key",
    wrong={"lmcache": ">=0.4.7"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    not_in_hooks=CONTENT,
    options=Options(
        connector="mp",
        block_size=16,
        num_blocks=60,
        chunk_size=64,
        windows=(64,),
        max_num_batched_tokens=1024,
        delay=4,
    ),
)
