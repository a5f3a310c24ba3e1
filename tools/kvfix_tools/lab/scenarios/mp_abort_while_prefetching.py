"""A request aborted while its prefetch runs: the server locks what it finds afterwards, and the lock is never freed."""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import abort, admit, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140)),
        step(),
        abort("r"),
        admit("next", prompt(200)),
        run(),
        settle(),
    ],
    rule="KVR009",
    # the connector lets the scheduler know of its locks only in this one
    hooks_releases=("0.5.4",),
    text="read locks of the server",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    delay=5,
)
