"""A request ends while its store is in flight: vLLM frees what is in the window no more, and others write to it."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, run_until_finished, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(256)),
        run_until_finished("r"),
        keep_blocks(0),  # others take the blocks that are in the window no more, and write to them
        step(3),
        free_blocks(),
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
