"""A request has more in a tier of the OffloadingConnector than its CPU memory holds, and is promoted for ever.

Each lookup takes room for the next chunk, and evicts one that the lookup before has asked for.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, budget, expect_all_ended, prompt, reset_prefix_cache, run

SCENARIO = Scenario(
    schedule=[
        budget(4),  # each chunk is in the tier before the next one is computed
        admit("before", prompt(193)),
        run(),
        reset_prefix_cache(),
        admit("r", prompt(193), max_tokens=2),
        run(200),
        expect_all_ended(),
    ],
    rule="LAB003",
    text="is WAITING for ever",
    wrong={"vllm": ">=0.32"},
    options=Options(
        connector="offloading", tier="fs", cpu_blocks=4, max_num_batched_tokens=32, extra={"blocks_per_chunk": 2}
    ),
    not_in_hooks=REQUEST,
)
