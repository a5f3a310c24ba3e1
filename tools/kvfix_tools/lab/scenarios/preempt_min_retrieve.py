"""A hit too small to be worth a load is recorded as if it had been loaded: a preempted request dies on its way back.

min_retrieve_tokens 512: of 1,024 tokens in LMCache, 800 are in vLLM, so the connector promises nothing. Its LoadSpec
says 1,024 all the same, and `build_connector_meta` asserts that the resumed request has as many computed tokens.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1100), max_tokens=8),
        step(),
        preempt("r"),
        keep_blocks(50),  # 800 tokens stay in the prefix cache, 1,024 are in LMCache
        step(),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 800 but",
    wrong={"lmcache": ">=0.3.14"},
    options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, lmcache={"min_retrieve_tokens": 512}),
    needs={"lmcache": ">=0.3.14"},
)
