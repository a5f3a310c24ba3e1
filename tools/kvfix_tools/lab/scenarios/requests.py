"""Requests with special options, and weight updates, with LMCache's in-process connector."""

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import Options, Scenario, scenario
from kvfix_tools.lab.steps import prompt

ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": {"req_id": "r", "receiver_host": "decoder"}}}}
NEW_WEIGHTS = (do.serve("first", prompt(128), max_tokens=4), do.new_weights(), do.admit("r", prompt(200), max_tokens=4))


def _not_in_key(doc: str, name: str) -> Scenario:
    """Return a scenario of two requests with the same prompt, and with different values of this parameter."""
    return scenario(
        do.serve("before", prompt(600), **{name: "one"}),
        do.admit("r", prompt(600), max_tokens=2, **{name: "other"}),
        doc=doc,
        shows="LAB001",
        options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
    )


SCENARIOS = {
    "abort-engine-assert": scenario(
        [do.admit("r", prompt(300), max_tokens=8), do.step(), do.abort("r")],
        shows="KVR011 finish_requests: AssertionError",
        wrong={"lmcache": ">=0.4.5,<0.5.1"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "abort-wants-first-token": scenario(
        do.admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"ret_first_tok": True}}}),
        do.step(),  # 128 of 300 tokens
        do.abort("r"),
        shows="KVR011 IndexError: list index out of range",
        # in the other releases an abort raises before (abort-engine-assert)
        wrong={"lmcache": ">=0.3.11,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        options=Options(kv_role="kv_producer"),
    ),
    "cache-salt-not-in-key": _not_in_key(
        "Two tenants share KV: LMCache's key does not have the cache_salt.", "cache_salt"
    ),
    "decode-tokens-left-out": scenario(
        [do.admit("other", prompt(20, seed=1), max_tokens=9), do.admit("r", prompt(43), max_tokens=9), do.step(2)],
        [do.budget(1), do.step(2), do.budget(128)],
        shows="LAB001 not the first ones",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.10,<0.4.3"},
        needs={"lmcache": ">=0.3.10"},
        options=Options(block_size=4, chunk_size=4, async_scheduling=True, lmcache={"save_decode_cache": True}),
    ),
    "decoder-named-in-part": scenario(
        # LMCache expects all keys of `disagg_spec`, but any client can send one (0.5.6 vllm_v1_adapter.py:1560-1574).
        do.admit("r", prompt(300), max_tokens=2, sampling=ASKS),
        shows="KVR011 KeyError: 'receiver_init_port'",
    ),
    "lora-not-in-key": _not_in_key(
        "Two LoRA adapters share KV: LMCache's key does not have the name of the adapter.", "lora"
    ),
    "producer-stores-what-it-must-not": scenario(
        do.admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
        shows="LAB010 and it asks for lmcache.skip_save",
        wrong={"lmcache": ">=0.3.12"},  # in earlier releases another bug ends the schedule
        options=Options(kv_role="kv_producer"),
    ),
    "prompt-embeds": scenario(
        do.admit("r", None, max_tokens=2, embeddings=(300, 0.0)),
        shows="KVR011 schedule: ",
        options=Options(chunk_size=256, max_num_batched_tokens=1024),
    ),
    "reset-keeps-external-cache": scenario(
        # With the fix the answer is False: the caller knows that the cache has old KV.
        NEW_WEIGHTS,
        doc="A weight update does not reset LMCache, vLLM answers True, and old KV is hit.",
        shows="LAB001 the step reads token 0 of",
        needs={"vllm": ">=0.15.1"},
        options=Options(max_num_batched_tokens=512),
    ),
}
