"""New weights while a store is in flight: it is done after the reset, and KV of the old weights is under valid keys.

`reset_cache` (lmcache_mp_connector.py 0.5.6:1201) asks the server to clear what has no lock and answers True. With the
fix the answer is False: the caller knows that the cache may have old KV.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, new_weights, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(200), max_tokens=4),
        step(3),  # its lookup is answered, and it is computed and stored
        new_weights(),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="other KV than that of tokens 0 on is stored under their key",
    not_in_hooks=CONTENT,
    wrong={"lmcache": ">=0.5.6", "vllm": ">=0.22.0"},
    needs={"lmcache": ">=0.5.6"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256, delay=2),
)
