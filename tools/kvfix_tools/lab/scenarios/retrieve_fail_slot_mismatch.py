"""After a failed load the tracker holds tokens for which the request has no slots: the worker dies when it saves."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(1536)),
        admit("r", prompt(1540), max_tokens=2),
        fail_load("r", after_chunks=1),
        run(20),
        settle(),
    ],
    rule="KVR011",
    text="wait_for_save: AssertionError",
    wrong={"lmcache": ">=0.3.10,<=0.3.15"},  # before, the tracker is as wrong, but nothing is saved then
    needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
    options=Options(num_blocks=110, chunk_size=256, max_num_batched_tokens=2048),
)
