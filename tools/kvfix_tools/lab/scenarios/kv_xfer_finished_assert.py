"""A request is aborted while it is loaded: load and request are both reported done, and vLLM asserts on the second.

vLLM frees the request at the first report and looks for it at the other (scheduler.py 0.32.0:3222-3235).
"""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import abort, admit, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140), max_tokens=4),
        step(5),
        abort("r"),
        admit("next", prompt(200)),  # if EngineCore lives, it serves the next one
        run(),
        settle(),
    ],
    rule="KVR011",
    text="update_from_output: AssertionError",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    delay=4,
)
