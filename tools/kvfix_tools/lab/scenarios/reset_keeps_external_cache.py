"""New weights, and vLLM answers that the connector's cache was reset: LMCache keeps all, and old KV is hit.

Its in-process connector has no `reset_cache`; vLLM takes the None of its base class for success (scheduler.py
0.32.0:2898). With the fix the answer is False: the caller knows that the cache has old KV.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, new_weights, prompt, run, settle

SCHEDULE = (
    admit("first", prompt(128), max_tokens=4),
    run(),
    new_weights(),
    admit("r", prompt(200), max_tokens=4),
    run(),
    settle(),
)
SCENARIO = Scenario(
    schedule=SCHEDULE,
    rule="LAB001",
    text="the step reads token 0 of",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.15.1"},
    needs={"vllm": ">=0.15.1"},
    options=Options(max_num_batched_tokens=512),
)
