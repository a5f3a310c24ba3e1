"""A request is preempted between two steps, as by a reset, and loads from the OffloadingConnector in the next.

EngineCore dies: the OffloadingConnector asserts that what is in flight of a preempted request is a store.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=30),
        step(10),  # its prompt is stored
        preempt("r"),
        keep_blocks(10),  # vLLM's prefix cache loses its end
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="schedule: AssertionError",
    request="",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(connector="mp", offloading="first", delay=0, max_num_batched_tokens=512),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
)
