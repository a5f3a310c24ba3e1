"""With prompt_logprobs vLLM asks the connector and takes nothing; a preempted request dies on its way back.

vLLM skips reading prefix caches for such a request (scheduler.py 0.32.0:982), its own and the external one; the
LoadSpec still says what was hit, and `build_connector_meta` asserts it of the resumed request.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, preempt, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1100), max_tokens=8, sampling={"prompt_logprobs": 1}),
        step(),
        preempt("r"),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 0 but",
    # vLLM before 0.31 skips only its own prefix cache for such a request, and takes what the connector has
    wrong={"vllm": ">=0.31.0", "lmcache": ">=0.3.10.post1"},
    options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048),
)
