"""A session is preempted while the step that ends its turn is in flight: it is taken out of all queues.

It has got its next input meanwhile, and waits for ever. The scheduler says that it has nothing to do.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, expect_all_ended, preempt, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(30), resumable=True),
        step(),
        preempt("r"),
        add_input("r", prompt(16, seed=1)),
        run(),
        end_input("r"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="for ever",
    wrong={"vllm": ">=0.32,<0.33"},
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
    options=Options(async_scheduling=True),
)
