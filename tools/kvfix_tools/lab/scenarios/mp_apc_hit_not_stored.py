"""A miss in the cache, a hit in vLLM: so many tokens at the end of the prompt are computed and not stored."""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.steps import admit, evict, expect_stored, prompt, run, settle

SCENARIO = mp_scenarios(
    schedule=[
        admit("before", prompt(140)),
        run(),
        settle(),
        evict(8),  # vLLM still has the prompt
        admit("r", prompt(270)),
        run(),
        settle(),
        expect_stored("r"),
    ],
    rule="LAB004",
    not_in_hooks=CONTENT,
    wrong=">=0.4.5,<0.5.6",
    max_num_batched_tokens=256,
)
