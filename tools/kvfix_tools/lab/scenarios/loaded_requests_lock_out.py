"""Two requests are loaded; the first by priority needs more blocks than are free, the other is not asked: for ever.

"low" has 8 of 20 blocks, loaded, and needs one more; no step has room for it at first. "r" has a higher priority: 8 of
its 16 blocks are loaded, which "low" leaves free. For its next step it needs 8 more, 4 are free, and `schedule` stops
there (scheduler.py 0.32.0:1275-1282). With `scheduler_reserve_full_isl` "r" would be admitted when all 16 are free.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, budget, expect_all_ended, prompt, run, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        stored_elsewhere(prompt(128, seed=1)),
        admit("running", prompt(16, seed=2), max_tokens=16),
        step(),
        admit("low", prompt(140), max_tokens=2, priority=1),
        step(),
        admit("r", prompt(256, seed=1), max_tokens=2, priority=0),
        step(7),  # both load
        budget(1),  # which "running" takes
        step(5),
        budget(256),
        run(200),
        expect_all_ended(),
    ],
    rule="LAB009",
    text="1 request is loaded and waits behind r, which needs 8 blocks; 4 can be had",
    not_in_hooks=REQUEST,
    wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
    needs={"lmcache": ">=0.4.5", "vllm": ">=0.32.0"},
    options=Options(
        connector="mp",
        delay=5,
        block_size=16,
        num_blocks=21,
        chunk_size=64,
        max_num_batched_tokens=256,
        reserve_full_isl=False,
        policy="priority",
    ),
)
