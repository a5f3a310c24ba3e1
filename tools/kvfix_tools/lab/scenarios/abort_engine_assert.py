"""The first client that goes away kills EngineCore: a bare assertion that the scheduler has a cache engine."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, admit, prompt, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=8),
        step(),
        abort("r"),
        settle(),
    ],
    rule="KVR011",
    text="finish_requests: AssertionError",
    wrong={"lmcache": ">=0.4.5,<0.5.1"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
