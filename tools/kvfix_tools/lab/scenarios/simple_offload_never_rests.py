"""More prompts than its CPU memory holds, with `lazy_offload`: the SimpleCPUOffloadConnector copies them for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(480)),
        run(200),
        settle(),
    ],
    rule="LAB029",
    wrong={"vllm": ">=0.32"},
    request="",
    options=Options(
        connector="simple-offload",
        extra={"lazy_offload": True},
        cpu_blocks=16,
        max_num_batched_tokens=32,
        num_blocks=34,
    ),
    not_in_hooks="no hook is called wrongly: that the same blocks come again is no rule of it",
)
