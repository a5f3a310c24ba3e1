"""A worker does not answer, and every step of the scheduler waits the whole timeout for the same request's lookup.

There is no room for the request, so vLLM asks for it on every step; a lookup that timed out is not remembered.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, lookups_fail, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        lookups_fail(4),
        keep_blocks(0),
        admit("r", prompt(300)),
        step(4),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR012",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
