"""A request that vLLM computes itself is loaded all the same, into blocks in use; EngineCore dies when that is done.

With `prompt_logprobs` vLLM reads no cache, its own or another. The connector is asked all the same, and told that
nothing is granted.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
        run(),
        settle(),
    ],
    rule="KVR004",
    # before vLLM 0.31 such a request takes what the connector has
    wrong={"vllm": ">=0.31.0", "lmcache": ">=0.4.5,<0.5.5"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256, delay=0),
)
