"""A request id that is used again gets the hit of the aborted request before it: KV is promised that is not there."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import abort, admit, free_blocks, keep_blocks, prompt, reset_prefix_cache, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(600)),
        run(),
        reset_prefix_cache(),
        keep_blocks(0),
        admit("r", prompt(600), max_tokens=2),
        step(),
        abort("r"),
        step(),
        free_blocks(),
        admit("r", prompt(700, seed=5), max_tokens=2),  # another prompt, of which nothing is cached
        run(),
        settle(),
    ],
    rule="LAB002",
    not_in_hooks=REQUEST,
    wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
