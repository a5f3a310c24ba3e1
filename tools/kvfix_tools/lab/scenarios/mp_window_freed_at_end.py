"""A request ends while its store is in flight: vLLM frees what is in the window no more, and others write to it."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(256)),
        step(),
        # one step later than "r" it takes the blocks that are in the window no more, and writes to them
        admit("other", prompt(288, seed=1)),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="is stored under their key",
    wrong={"lmcache": ">=0.4.7"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    hooks_rule="KVR014",
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
