"""A request is aborted before the decode engine has blocks for it: its worker waits for it for ever."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, ask, expect_all_ended, on, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        on("decode", "keep_blocks", 0),
        ask("r", prompt(64)),
        step(4),
        abort("r"),
        on("decode", "free_blocks"),
        ask("s", prompt(32), 60),
        run(),
        expect_all_ended(),
    ],
    rule="KVR009",
    text="_recving_metadata still holds it",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-push"),
    needs={"vllm": ">=0.32"},
)
