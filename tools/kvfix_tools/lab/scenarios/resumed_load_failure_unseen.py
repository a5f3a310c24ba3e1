"""A request is preempted, comes back with a load, and that fails: vLLM does not see it and computes on top of nothing.

vLLM looks for failed blocks among what was cached when the request was first scheduled (scheduler.py 0.15.1:2007).
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, preempt, prompt, reset_prefix_cache, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(100), max_tokens=4),
        step(),
        preempt("r"),
        reset_prefix_cache(),
        fail_load("r"),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="its slot holds other KV",
    wrong={"vllm": ">=0.11.2,<0.20"},
    needs={"lmcache": ">=0.3.10"},  # before, a resumed request loads nothing
    options=Options(chunk_size=32, max_num_batched_tokens=256),
)
