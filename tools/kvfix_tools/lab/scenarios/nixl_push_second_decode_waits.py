"""A router sends a request to decode again: its prefill is pushed to one of the two, the other waits for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run, send_again, step

SCENARIO = Scenario(
    schedule=[ask("r", prompt(64), 2), step(3), send_again("r"), run(), expect_all_ended()],
    rule="LAB003",
    text="WAITING_FOR_REMOTE_KVS",
    request="r-00000003",
    wrong={"vllm": ">=0.32"},
    # Its end comes while the steps go on: else it would be a pause, after which a load may come short.
    options=Options(connector="nixl-push", prefix_caching=False, extra={"push_registration_timeout": 0.5}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
