"""A load fails, and before vLLM hears of it the request is preempted: what the failed step has said is kept.

vLLM looks at the requests that run. With asynchronous scheduling the next step is scheduled before the answer of the
last one is there; here another request needs a block for its first token, and there is none.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    fail_load,
    free_blocks,
    keep_blocks,
    prompt,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(96)),
        fail_load("r"),
        admit("other", prompt(32, seed=1), max_tokens=4),
        admit("r", prompt(100), max_tokens=4),
        step(),
        keep_blocks(0),
        step(),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="LAB008",
    not_in_hooks=CONTENT,
    text="is not what the model says",
    wrong={"vllm": ">=0.11.2"},
    needs={"lmcache": ">=0.4.1"},
    options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
)
