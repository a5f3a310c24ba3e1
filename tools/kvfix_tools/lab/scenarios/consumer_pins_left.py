"""A decode instance (kv_consumer) never takes back the pins of its lookups."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(512)),
        admit("r", prompt(600), max_tokens=2),
        run(),
        settle(),
    ],
    rule="KVR009",
    text="pins of the worker",
    wrong={"lmcache": "<0.4.3"},
    options=Options(chunk_size=256, max_num_batched_tokens=1024, kv_role="kv_consumer"),
)
