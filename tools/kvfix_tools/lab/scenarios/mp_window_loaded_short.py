"""In front of a window vLLM keeps two tokens for three MTP modules: their block is not loaded, and is cached.

Of "r" 128 tokens are loaded, of the window of 32 the last two blocks. vLLM has a third, from token 80 on, and caches
it. "other", for which LMCache finds nothing, hits 112 tokens in vLLM and reads from token 81 on.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, lookups_fail, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(160), max_tokens=2),
        run(),
        lookups_fail(1),
        admit("other", prompt(128) + prompt(40, seed=1), max_tokens=2),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="in KV group 1",
    wrong={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
    not_in_hooks=CONTENT,
    options=Options(
        connector="mp",
        block_size=16,
        num_blocks=60,
        chunk_size=64,
        windows=(32,),
        drafter="mtp",
        drafts=3,
        acceptance=50,
    ),
)
