"""Two requests of decode wait for one prefill: the one that comes second is in no answer, and waits for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask_at_once, expect_all_ended, on, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[
        on("prefill", "budget", 8),
        on("decode", "take_blocks", 60),
        ask_at_once("r", prompt(64), 2),
        step(),
        on("decode", "abort", "r-00000002"),
        on("decode", "free_blocks"),
        step(),
        send_again("r"),
        run(),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="for ever",
    request="r-00000003",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mooncake", prefix_caching=False, num_blocks=60),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
