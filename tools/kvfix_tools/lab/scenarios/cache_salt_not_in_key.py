"""Two tenants share KV: LMCache in the engine does not look at the cache_salt that keeps them apart in vLLM."""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(600), cache_salt="one"),
        run(),
        admit("r", prompt(600), max_tokens=2, cache_salt="two"),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong={"lmcache": ">=0.3.9"},
    options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
)
