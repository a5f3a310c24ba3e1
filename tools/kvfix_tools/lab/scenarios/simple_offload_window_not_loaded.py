"""vLLM keeps more than the window, and the SimpleCPUOffloadConnector loads the window: the rest is cached all the same.

Another request, whose window begins there, reads what was in the block before.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, reset_prefix_cache, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(145)),
        run(),
        settle(),
        reset_prefix_cache(),
        admit("loads", prompt(145)),
        run(),
        admit("r", [*prompt(120), 5, 5, 5], max_tokens=2),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="in KV group 1",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="simple-offload", windows=(64,), drafter="mtp", drafts=5, acceptance=100, num_blocks=128,
        max_num_batched_tokens=512,
    ),
    not_in_hooks=CONTENT,
)  # fmt: skip
