"""The worker remembers the id of every request that has ended, and a request whose id comes again is never freed."""

from kvfix_tools.lab.scenario import MEMORY, mp_scenarios
from kvfix_tools.lab.steps import admit, expect_forgotten, prompt, run

SCENARIO = mp_scenarios(
    schedule=[
        admit("r", prompt(20)),
        run(),
        *[step for number in range(80) for step in (admit(f"r{number}", prompt(20)), run())],
        expect_forgotten("r"),
    ],
    rule="KVR009",
    not_in_hooks=MEMORY,
    text="worker_adapter._returned_finished",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
