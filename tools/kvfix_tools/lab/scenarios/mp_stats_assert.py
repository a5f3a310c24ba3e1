"""A client that asks for cache statistics and goes away before its lookup kills EngineCore."""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import abort, admit, prompt, run, settle

ASKS = {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}

SCENARIO = mp_scenarios(
    schedule=[
        admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": ASKS}}),
        abort("r"),
        admit("next", prompt(140)),  # if EngineCore is alive, it serves the next one
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Request tracker for request_id r not found",
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
