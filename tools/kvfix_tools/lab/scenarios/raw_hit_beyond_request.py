"""A hit from the lookup cache is promised whole, and with what vLLM has computed it exceeds the request.

1,101 tokens, 1,024 of them in LMCache, 800 in vLLM's prefix cache after a preemption. The first answer is 224; there
are too few blocks; the second is 1,024, and vLLM finds 1,824 computed tokens in a request of 1,101: a bare
AssertionError (vllm/v1/core/sched/scheduler.py 0.32.0:1048).
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1100), max_tokens=8),
        step(),
        preempt("r"),
        keep_blocks(50),  # of its 69 blocks, 50 stay in the prefix cache: 800 tokens
        step(),  # match(800) by a lookup
        step(),  # match(800) from the lookup cache
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR001",
    wrong={"lmcache": "==0.3.10"},
    options=Options(block_size=16, num_blocks=100, chunk_size=256, max_num_batched_tokens=2048),
)
