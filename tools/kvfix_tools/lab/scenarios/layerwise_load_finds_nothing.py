"""By layers: none of the chunks that were hit is left when they are to be loaded, and EngineCore dies.

`retrieve_layer` (cache_engine.py 0.5.6:1133) goes on with a variable that is set only where a chunk was found.
"""

from kvfix_tools.lab.scenario import LAYERS, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_all_ended, fail_load, prompt, run, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        fail_load("r"),
        admit("r", prompt(300), max_tokens=4),
        run(),
        expect_all_ended(),
    ],
    rule="KVR011",
    text="mem_obj_consumer",
    not_in_hooks=LAYERS,
    wrong={"lmcache": ">=0.3.15"},
    needs={"lmcache": ">=0.3.15"},
    options=Options(lmcache={"use_layerwise": True}, max_num_batched_tokens=512),
)
