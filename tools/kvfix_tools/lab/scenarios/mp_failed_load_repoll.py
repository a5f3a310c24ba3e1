"""A request whose load failed is promised the same tokens again, they are never loaded, and it waits for ever.

The worker loses the server for a moment: that is the failure that these releases report. (For the other they do not,
see mp-retrieve-false.)
"""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import admit, lose_loads, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140), max_tokens=2),
        step(6),  # the load is in flight
        lose_loads(),
        run(60),
        settle(),
    ],
    rule="KVR010",
    wrong=">=0.4.5,<0.5.5",
    max_num_batched_tokens=256,
    delay=4,
)
