"""Two requests of decode wait for one prefill: the one that comes second is in no answer, and waits for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[
        ask("r", prompt(64), 2),
        step(3),
        send_again("r"),
        run(),
    ],
    rule="LAB003",
    text="for ever",
    request="r-00000003",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
