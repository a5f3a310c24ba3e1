"""A request that reads no cache is looked up all the same, and what it locks stays locked until that times out.

With `prompt_logprobs` vLLM reads no cache. It admits the request before the lookup is answered.
"""

from kvfix_tools.lab.scenario import SERVER, mp_scenarios
from kvfix_tools.lab.steps import admit, prompt, run, settle, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
        run(),
        settle(),
    ],
    rule="KVR009",
    not_in_hooks=SERVER,
    text="read locks of the server",
    wrong=">=0.4.5",
    vllm=">=0.31.0",  # before, such a request takes what the connector has
    max_num_batched_tokens=256,
)
