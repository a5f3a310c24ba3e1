"""NIXL loads into blocks of an ended request that the OffloadingConnector still copies: it stores other KV.

A MultiConnector of both, in a decode engine. The blocks of a load by NIXL are allocated before the request is in any
step, and the OffloadingConnector waits only for copies of blocks that are allocated in a step.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import ask, ask_decode, expect_all_ended, on, prompt, run

SCENARIO = Scenario(
    schedule=[
        on("decode", "keep_blocks", 5),
        ask_decode("a", prompt(64)),
        ask("r", prompt(64, seed=1)),  # its load is granted the blocks of "a", when that has ended
        run(),
        on("decode", "free_blocks"),
        expect_all_ended(),
    ],
    rule="LAB001",
    text="the OffloadingConnector stores other KV",
    request="a-00000002",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="nixl-offload", offloading="last", delay=3, prefix_caching=False),
    needs={"vllm": ">=0.32"},
    not_in_hooks=CONTENT,
)
