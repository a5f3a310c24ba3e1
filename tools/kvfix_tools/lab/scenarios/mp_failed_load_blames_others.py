"""A load fails, and requests that only share computed blocks with it are failed with it.

The load begins with a chunk of which vLLM has the first blocks; those are reported as failed too, and another request
is running on them. With vLLM's default, `kv_load_failure_policy=fail`, that request ends with an error.
"""

from kvfix_tools.lab.scenario import REQUEST, mp_scenarios
from kvfix_tools.lab.steps import admit, expect_unharmed, lose_loads, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        admit("other", prompt(90), max_tokens=20),  # five blocks, one chunk
        step(4),
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140)),  # five blocks are here, the second chunk is loaded
        step(2),
        lose_loads(),
        expect_unharmed("other"),
        run(),
        settle(),
    ],
    rule="LAB005",
    not_in_hooks=REQUEST,
    request="other",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
    kv_load_failure_policy="fail",
)
