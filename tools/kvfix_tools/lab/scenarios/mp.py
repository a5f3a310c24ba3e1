"""LMCache's multi-process connector and vLLM's copy of it."""

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import MEMORY, SERVER, mp_scenarios
from kvfix_tools.lab.scenarios.requests import NEW_WEIGHTS
from kvfix_tools.lab.steps import prompt

ASKS = {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}

SCENARIOS = {
    "kv-xfer-finished-assert": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=4), do.step(5), do.abort("r")],
        do.admit("next", prompt(200)),  # if EngineCore is alive, it serves this request
        shows="KVR011 update_from_output: AssertionError",
        delay=4,
    ),
    "mp-abort-before-alloc": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.keep_blocks(0), do.admit("r", prompt(140)), do.step(3)],
        [do.abort("r"), do.free_blocks(), do.admit("next", prompt(200))],
        shows="KVR009 read locks of the server",
        doc="A request is aborted after its lookup, before its admission: the server keeps its read locks.",
        # only in these releases the scheduler's connector knows of the locks
        hooks_releases=("0.4.6", "0.5.4"),
    ),
    "mp-abort-while-prefetching": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140)), do.step()],
        [do.abort("r"), do.admit("next", prompt(200))],
        shows="KVR009 read locks of the server",
        doc="A request is aborted while the server prefetches for it: the server never unlocks the chunks.",
        # only in this release the scheduler's connector knows of the locks
        hooks_releases=("0.5.4",),
        delay=5,
    ),
    "mp-apc-hit-not-stored": mp_scenarios(
        [do.serve("before", prompt(140)), do.settle()],
        do.evict(8),  # vLLM still has the prompt
        [do.serve("r", prompt(270)), do.settle(), do.expect_stored("r")],
        shows="LAB004",
        doc="vLLM has a prefix that LMCache lacks: as many tokens at the end of the prompt are never stored.",
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-ended-ids-kept": mp_scenarios(
        do.serve("r", prompt(20)),
        *[do.serve(f"r{number}", prompt(20)) for number in range(80)],
        do.expect_forgotten("r"),
        shows="KVR009 worker_adapter._returned_finished",
        not_in_hooks=MEMORY,
    ),
    "mp-failed-load-blames-others": mp_scenarios(
        # With kv_load_failure_policy=fail, vLLM's default, "other" ends with an error.
        do.admit("other", prompt(90), max_tokens=20),  # five blocks, one chunk
        [do.step(4), do.stored_elsewhere(prompt(128))],
        do.admit("r", prompt(140)),  # vLLM has five blocks, the second chunk is loaded
        [do.step(2), do.lose_loads(), do.expect_unharmed("other")],
        shows="LAB005",
        kv_load_failure_policy="fail",
    ),
    "mp-failed-load-repoll": mp_scenarios(
        # The worker loses the server for a moment. These releases report this failure, but not others
        # (mp-retrieve-false).
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=2)],
        do.step(6),  # the load is in flight
        do.lose_loads(),
        shows="KVR010",
        doc="A load fails, and LMCache promises the same tokens again without a load: the request waits for ever.",
        wrong=">=0.4.5,<0.5.5",
        delay=4,
    ),
    "mp-failed-load-stores-ahead": mp_scenarios(
        # vLLM has 64 tokens, the cache 128. The load fails, and vLLM continues at token 64. The tracker still counts
        # the 128 tokens of the hit, so it stores tokens 128 to 192 when only 144 are computed.
        [do.serve("short", prompt(70)), do.stored_elsewhere(prompt(128))],
        [do.admit("r", prompt(300), max_tokens=2), do.step(2)],
        do.lose_loads(),  # the load was in flight
        shows="KVR008",
        max_num_batched_tokens=40,
    ),
    "mp-free-locks-salt": mp_scenarios(
        do.serve("before", prompt(140), cache_salt="tenant"),
        do.admit("r", prompt(140), cache_salt="tenant"),  # vLLM has all tokens of the hit
        shows="KVR009 read locks of the server",
        not_in_hooks=SERVER,
        wrong=">=0.4.5,<0.5.1",
    ),
    "mp-freed-while-stored": mp_scenarios(
        # The store of the first chunk ends early. The last chunk is still copied when the request ends.
        [do.admit("r", prompt(256)), do.run_until_finished("r")],
        do.step(),  # the worker learns of the end, and answers
        do.keep_blocks(0),  # other requests take its blocks and write to them
        [do.step(4), do.free_blocks()],
        shows="LAB001 is stored under their key",
        hooks_rule="KVR009",
        max_num_batched_tokens=16,
        delay=3,
    ),
    "mp-lookup-double-count": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.keep_blocks(4), do.admit("r", prompt(800), max_tokens=2)],
        do.step(4),  # the lookup, then three polls without enough blocks
        do.free_blocks(),
        shows="KVR007",
        doc="Each poll of a waiting request counts its hit again as stored: no token after the hole is hit.",
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-lookup-for-nothing": mp_scenarios(
        # With `prompt_logprobs` vLLM reads no cache, and admits the request before the lookup is answered.
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1})],
        shows="KVR009 read locks of the server",
        not_in_hooks=SERVER,
        vllm=">=0.31.0",  # before, this request takes the promise of the connector
    ),
    "mp-lora-not-in-key": mp_scenarios(
        [do.serve("before", prompt(140), lora="one"), do.admit("r", prompt(140), max_tokens=2, lora="other")],
        shows="LAB001",
    ),
    "mp-preempt-store-overwrite": mp_scenarios(
        [do.admit("r", prompt(200), max_tokens=20), do.step(4)],
        do.step(),  # computed and handed over; the server copies some steps later
        do.preempt("r"),
        do.keep_blocks(0),  # other requests take its blocks and write to them
        [do.step(3), do.free_blocks()],
        shows="LAB001 is stored under their key",
        wrong=">=0.4.5,<0.5.6",
        num_blocks=50,
        max_num_batched_tokens=1024,
        delay=3,
    ),
    "mp-prompt-embeds": mp_scenarios(
        do.store("before", None, embeddings=(140, 0.0)),
        [do.serve("r", None, max_tokens=2, embeddings=(140, 1.0)), do.admit("next", [7] * 140)],
        shows="LAB001",
    ),
    "mp-reset-keeps-external-cache": mp_scenarios(
        NEW_WEIGHTS,
        shows="LAB001 the step reads token 0 of",
        doc="A weight update does not reset the LMCache server, vLLM answers True, and old KV is hit.",
        wrong=">=0.4.5,<0.5.6",
        max_num_batched_tokens=128,
    ),
    "mp-retrieve-false": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=2), do.fail_load("r")],
        shows="LAB001",
        wrong=">=0.4.5,<0.5.5",
    ),
    "mp-session-stores-ahead": mp_scenarios(
        # 63 drafts were rejected in nine steps, and the tracker counts them as computed. The next step computes 64 of
        # the 200 input tokens, up to token 113. The tracker counts 176 and stores tokens 64 to 128.
        [do.serve("r", prompt(40), max_tokens=10, resumable=True), do.add_input("r", prompt(200, seed=1))],
        [do.step(3), do.run(), do.end_input("r")],
        shows="LAB001 other KV than that of tokens 64 on is stored under their key",
        hooks_rule="KVR008",
        max_num_batched_tokens=64,
        drafter="eagle",
        drafts=7,
        lmcache={"mp.save_decode_cache": True},
    ),
    "mp-stats-assert": mp_scenarios(
        [do.admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": ASKS}}), do.abort("r")],
        do.admit("next", prompt(140)),  # if EngineCore is alive, it serves this request
        shows="KVR011 Request tracker for request_id r not found",
    ),
}
