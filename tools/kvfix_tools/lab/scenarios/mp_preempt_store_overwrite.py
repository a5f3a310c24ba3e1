"""A store is in flight, its request is preempted, others write to its blocks: their KV is stored under its keys."""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, preempt, prompt, run, settle, step

SCENARIO = mp_scenarios(
    schedule=[
        admit("r", prompt(200), max_tokens=20),
        step(4),
        step(),  # computed and handed over; the server copies some steps later
        preempt("r"),
        keep_blocks(0),  # others take its blocks and write to them
        step(3),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="is stored under their key",
    wrong=">=0.4.5,<0.5.6",
    num_blocks=50,
    max_num_batched_tokens=1024,
    delay=3,
)
