"""With `bidirectional_kv_xfer` a decode engine computes a prompt by itself: its blocks are held for ever."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("alone"),
        ask("r", prompt(64)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB020",
    text="of the decode engine",
    request="",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull", extra={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3}),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
