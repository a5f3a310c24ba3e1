"""Two loads hold all blocks: each in turn runs, needs one more, and is preempted; what it has generated is dropped.

A prefill engine, role kv_producer, whose router lets it generate two tokens, with asynchronous scheduling. The prompts
end with a block. While one request loads again, the load of the other is done.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, prompt, run, step

SCENARIO = Scenario(
    schedule=[
        ask("a", prompt(64)),
        ask("b", prompt(64, seed=1)),
        run(),  # the OffloadingConnector has both prompts
        ask("r", prompt(64), prefill_tokens=2),
        step(3),
        ask("other", prompt(64, seed=1), prefill_tokens=2),
        run(500),
        expect_all_ended(),
    ],
    rule="LAB003",
    request="r-00000001",
    not_in_hooks=REQUEST,
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="nixl-offload",
        offloading="first",
        delay=5,
        num_blocks=9,
        decode_blocks=60,
        prefix_caching=False,
        async_scheduling=True,
    ),
    needs={"vllm": ">=0.32"},
)
