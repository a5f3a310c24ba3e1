"""Another connector of a MultiConnector is chosen to load a preempted request, and EngineCore dies on its way back.

vLLM asks all connectors and takes the first that promises something; LMCache's LoadSpec says what it would have loaded,
and `build_connector_meta` asserts it of the resumed request.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    free_blocks,
    has_in_other_connector,
    keep_blocks,
    preempt,
    prompt,
    run,
    settle,
    step,
)

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1100), max_tokens=8),
        step(),
        preempt("r"),
        keep_blocks(50),  # 800 tokens stay in the prefix cache, LMCache has 1,024, the other connector 1,088
        has_in_other_connector("r"),
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 1088 but",
    wrong={"lmcache": ">=0.3.10.post1"},
    options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, beside=True),
)
