"""By layers: a part of the chunks that were hit is left, the others are not reported, and the step reads other KV.

`wait_for_layer_load` logs how many tokens were loaded (vllm_v1_adapter.py 0.5.6:990-992), and that is all.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_all_ended, fail_load, prompt, run, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        fail_load("r", after_chunks=2),
        admit("r", prompt(300), max_tokens=4),
        run(),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="the step reads token 128 of",
    not_in_hooks=CONTENT,
    wrong={"lmcache": ">=0.3.15"},
    needs={"lmcache": ">=0.3.15"},
    options=Options(lmcache={"use_layerwise": True}, max_num_batched_tokens=512),
)
