"""A preempted request of which vLLM has more than LMCache dies on its way back."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1000), max_tokens=8),
        step(),
        preempt("r"),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 992 but lmcache_cached_tokens 768",
    wrong={"lmcache": ">=0.3.10.post1,<=0.3.10.post2"},
    options=Options(num_blocks=80, chunk_size=256, max_num_batched_tokens=2048),
)
