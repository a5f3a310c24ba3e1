"""Each poll of a waiting request counts its hit again as stored: a hole is left, and what follows is unreachable."""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        keep_blocks(4),
        admit("r", prompt(800), max_tokens=2),
        step(4),  # the lookup, then three polls without enough blocks
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR007",
    wrong=">=0.4.5,<0.5.6",
    max_num_batched_tokens=256,
)
