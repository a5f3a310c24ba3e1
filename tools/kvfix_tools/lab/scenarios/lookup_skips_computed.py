"""What vLLM has in its prefix cache counts as found in LMCache, and is promised when vLLM has it no more.

The lookup leaves out the chunks that vLLM has computed and adds them to what is found (lmcache_lookup_client.py
0.3.11:190-243); the sum is kept for the next question about the request. LMCache has evicted the 256 tokens, vLLM has
them, and has no room for the request yet; by the time that it has, others have taken those blocks too. The load comes
short, and vLLM computes them again; with kv_load_failure_policy "fail" the request ends with an error. The tokens also
count as stored, so they never are: rule KVR007.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, evict, free_blocks, keep_blocks, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(300)),
        run(),
        evict(9),
        keep_blocks(20),  # the prefix is among them
        admit("r", prompt(600)),
        step(),  # match(288): hit 256, of which LMCache has nothing; no free blocks
        keep_blocks(0),
        step(),  # match(0) from the lookup cache: 256 are promised
        free_blocks(),
        run(),
        settle(),
    ],
    rule="LAB002",
    not_in_hooks=REQUEST,
    wrong={"lmcache": ">=0.3.10.post2,<0.3.12"},
    options=Options(num_blocks=64, chunk_size=256, max_num_batched_tokens=512),
)
