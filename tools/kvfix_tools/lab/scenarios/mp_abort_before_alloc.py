"""A request aborted between its lookup and its admission keeps the read locks of the server until they time out."""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import abort, admit, free_blocks, keep_blocks, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        keep_blocks(0),
        admit("r", prompt(140)),
        step(3),
        abort("r"),
        free_blocks(),
        admit("next", prompt(200)),
        run(),
        settle(),
    ],
    rule="KVR009",
    # the connector lets the scheduler know of its locks only in these
    hooks_releases=("0.4.6", "0.5.4"),
    text="read locks of the server",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
