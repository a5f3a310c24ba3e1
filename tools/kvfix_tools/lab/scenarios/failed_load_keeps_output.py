"""A load fails while the next step is in flight, and the token that this step says is taken for the request's.

With asynchronous scheduling, vLLM's default on a GPU, a step is scheduled before the answer of the last one is there.
160 tokens are promised of 161, the load brings none. vLLM takes the request back to token 0 and drops what the failed
step has said (scheduler.py 0.32.0:2088); the next one has computed on top of it, and its token is kept.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(192)),
        run(),
        reset_prefix_cache(),
        fail_load("r"),
        admit("r", prompt(193), max_tokens=8),
        run(),
        settle(),
    ],
    rule="LAB008",
    not_in_hooks=CONTENT,
    text="is not what the model says",
    wrong={"vllm": ">=0.15"},
    needs={"lmcache": ">=0.4.1"},  # before, LMCache dies of such a request (KVF008)
    options=Options(max_num_batched_tokens=512, async_scheduling=True, kv_load_failure_policy="recompute"),
)
