"""With asynchronous scheduling the tracker leaves out what is generated, and a later token comes to the wrong place.

LMCache to 0.4.2 adds the tokens from the computed ones on; the one there is in flight and not known yet. It is known
where the request has sat out a step, here for want of budget: then it is added behind those that the tracker has.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, budget, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("other", prompt(20, seed=1), max_tokens=9),
        admit("r", prompt(43), max_tokens=9),
        step(2),
        budget(1),
        step(2),
        budget(128),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="not the first ones",
    wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.10,<0.4.3"},
    needs={"lmcache": ">=0.3.10"},
    options=Options(block_size=4, chunk_size=4, async_scheduling=True, lmcache={"save_decode_cache": True}),
)
