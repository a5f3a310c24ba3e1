"""A load fails, and what the step computes on top of it is stored under valid keys: others get wrong answers from it.

128 tokens are hit and promised, the load brings none of them. vLLM learns of the failed blocks and drops the output of
the request, but the step has run: it computed tokens 128 to 300 from KV that is not there, and in the same step
`wait_for_save` stores 128 to 256 of them (vllm_v1_adapter.py 0.5.6:1104-1259 does not look at the failed blocks that
`start_load_kv` has just recorded). The next request with this prompt is answered from them. No line is logged for it.
With kv_load_failure_policy "recompute" the right KV is computed and stored again a step later; the cache keeps the
chunks that it has.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(128)),
        run(),
        reset_prefix_cache(),
        fail_load("failing"),
        admit("failing", prompt(300)),
        run(),
        reset_prefix_cache(),
        admit("r", prompt(300)),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="the step reads token 128 of",
    wrong={"lmcache": ">=0.3.9.post1"},
    # 0.3.9 does not tell vLLM that a load failed; before 0.13 vLLM has no such option, and computes it again
    needs={"lmcache": ">=0.3.9.post1", "vllm": ">=0.13.0"},
    options=Options(max_num_batched_tokens=512, kv_load_failure_policy="fail"),
)
