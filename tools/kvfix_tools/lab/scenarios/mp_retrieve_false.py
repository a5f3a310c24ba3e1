"""A load that failed is reported as done without its blocks: vLLM reads what was never loaded. Wrong text, no error."""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.steps import admit, fail_load, prompt, run, settle, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(140), max_tokens=2),
        fail_load("r"),
        run(60),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong=">=0.4.5,<0.5.5",
    max_num_batched_tokens=256,
)
