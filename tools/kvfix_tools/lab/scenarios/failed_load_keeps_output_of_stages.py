"""A load fails while two more chunks of the prompt are in flight: what the last one says is taken for the first token.

Three stages. The load of tokens 0 to 64 brings 16, and the chunks up to token 192 and up to the end are with the
workers when vLLM gets to know it.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, fail_load, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(64)),
        admit("r", prompt(230), max_tokens=2),
        fail_load("r", 1),
        run(),
        settle(),
    ],
    rule="LAB008",
    wrong={"lmcache": ">=0.4.5", "vllm": ">=0.32"},
    needs={"lmcache": ">=0.4.5", "vllm": ">=0.32"},
    not_in_hooks=REQUEST,
    options=Options(block_size=16, chunk_size=16, num_blocks=40, max_num_batched_tokens=64, ranks=3, pipeline=True),
)
