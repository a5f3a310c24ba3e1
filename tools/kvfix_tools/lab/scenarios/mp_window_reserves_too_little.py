"""Two requests are loaded, and each needs more blocks than are free: what the window needs was not reserved.

Of 320 tokens 256 are loaded: 16 blocks of full attention, and one of the window behind 15 null blocks. The rest takes 4
blocks of each. vLLM reserves 4 for "r" when it admits the load of "other": 5 of 39 blocks stay free.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_all_ended, prompt, run, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        stored_elsewhere(prompt(256, seed=1)),
        admit("r", prompt(320), max_tokens=2),
        admit("other", prompt(320, seed=1), max_tokens=2),
        run(200),
        expect_all_ended(),
    ],
    rule="LAB009",
    text="1 request is loaded and waits behind r, which needs 8 blocks; 5 can be had",
    wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.7"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32.0"},
    not_in_hooks=REQUEST,
    options=Options(
        connector="mp", block_size=16, num_blocks=40, chunk_size=64, windows=(16,), max_num_batched_tokens=64
    ),
)
