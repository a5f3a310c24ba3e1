"""To vLLM's model runner V2 a resumed request is a new one, and LMCache loads of it what belongs to the prompt.

96 tokens are in the cache, 64 of them the prompt: the conversation has gone on elsewhere. The request has generated 33
when it is preempted; 96 of its 97 are hit and promised, and the 32 generated ones are not loaded.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    continued,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(continued(prompt(64), 32)),
        admit("r", prompt(64), max_tokens=40),
        step(33),
        preempt("r"),
        reset_prefix_cache(),
        run(),
        settle(),
    ],
    rule="KVR004",
    text="tokens 0 to 64 are to be loaded",
    wrong={"vllm": ">=0.32", "lmcache": ">=0.3.10"},
    needs={"vllm": ">=0.32"},  # before, the second runner was for trials
    options=Options(chunk_size=32, model_runner_v2=True),
)
