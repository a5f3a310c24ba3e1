"""A request whose parameters lack a key is aborted before it is scheduled: the decode engine dies."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, ask, malform, on, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        malform("no_request"),
        on("decode", "keep_blocks", 0),
        ask("r", prompt(64)),
        step(3),
        abort("r"),
        step(),
        on("decode", "free_blocks"),
        run(),
    ],
    rule="KVR011",
    text="KeyError: 'remote_request_id'",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
)
