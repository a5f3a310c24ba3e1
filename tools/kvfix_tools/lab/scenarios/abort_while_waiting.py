"""A request aborted after its lookup and before its admission leaves LoadSpec, hit, priority and pins behind.

The pins keep chunks from being evicted until they time out (300 s).
"""

from kvfix_tools.lab.scenario import Options, Scenario
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
        free_blocks(),
        settle(),
    ],
    rule="KVR009",
    wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
