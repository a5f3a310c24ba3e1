"""A prefill is preempted while its last step is in flight: NixlConnector's worker keeps its id for ever."""

from kvfix_tools.lab.scenario import MEMORY, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, on, prompt, router_takes, run, step

SCENARIO = Scenario(
    schedule=[
        router_takes(1000),  # the decode engine dies of what it gets (KVF301)
        ask("r", prompt(28)),
        step(3),
        on("prefill", "preempt", "r-00000001"),
        on("prefill", "keep_blocks", 0),  # it does not go on before the answer is there
        step(2),
        on("prefill", "free_blocks"),
        run(),
        expect_all_ended(),
    ],
    rule="KVR009",
    text="_reqs_to_process",
    request="r-00000001",
    not_in_hooks=MEMORY,
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull", async_scheduling=True, block_size=4, max_num_batched_tokens=13),
    needs={"vllm": ">=0.32"},
)
