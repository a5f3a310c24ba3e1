"""A load fails in one rank, and the other one stores what the step computes on top of it under valid keys.

Two ranks. 128 tokens are hit and promised, the second rank's load brings none of them. Each rank's attention needs all
tokens, and every later layer needs that of all ranks: what the step computes of tokens 128 to 300 is wrong in both. The
second rank knows that its load failed (and does not store with KVF007); the first one does not know, and stores 128 to
256 in the same step (vllm_v1_adapter.py 0.5.6:1104-1259). vLLM ends the request, or computes it again, and the first
rank's cache keeps its chunks. The next request with this prompt is answered from them.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(128)),
        run(),
        reset_prefix_cache(),
        fail_load("failing", rank=1),
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
    wrong={"lmcache": ">=0.4.1"},
    # up to 0.3.15 another bug ends it first; several ranks were not tried with earlier releases of vLLM
    needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
    options=Options(max_num_batched_tokens=512, ranks=2),
)
