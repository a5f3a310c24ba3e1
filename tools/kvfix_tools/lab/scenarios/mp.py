"""LMCache's multi-process connector and vLLM's copy of it."""

from kvfix_tools.lab.scenario import MEMORY, SERVER, mp_scenarios
from kvfix_tools.lab.scenarios.requests import NEW_WEIGHTS
from kvfix_tools.lab.steps import (
    abort,
    add_input,
    admit,
    end_input,
    evict,
    expect_forgotten,
    expect_stored,
    expect_unharmed,
    fail_load,
    free_blocks,
    keep_blocks,
    lose_loads,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    run_until_finished,
    settle,
    step,
    stored_elsewhere,
)

ASKS = {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}

SCENARIOS = {
    "kv-xfer-finished-assert": mp_scenarios(
        # The request is aborted during its load. vLLM frees it at the first report and asserts at the second
        # (scheduler.py 0.32.0:3222-3235).
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140), max_tokens=4),
            step(5),
            abort("r"),
            admit("next", prompt(200)),  # if EngineCore is alive, it serves this request
            run(),
            settle(),
        ],
        "KVR011",
        text="update_from_output: AssertionError",
        delay=4,
    ),
    "mp-abort-before-alloc": mp_scenarios(
        [
            stored_elsewhere(prompt(128)),
            keep_blocks(0),
            admit("r", prompt(140)),
            step(3),
            abort("r"),
            free_blocks(),
            admit("next", prompt(200)),
            run(),
            settle(),
        ],
        "KVR009",
        doc=(
            "A request is aborted between its lookup and its admission: the server keeps its read locks until a "
            "timeout."
        ),
        # only in these releases the scheduler's connector knows of the locks
        hooks_releases=("0.4.6", "0.5.4"),
        text="read locks of the server",
    ),
    "mp-abort-while-prefetching": mp_scenarios(
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140)),
            step(),
            abort("r"),
            admit("next", prompt(200)),
            run(),
            settle(),
        ],
        "KVR009",
        doc=(
            "A request is aborted while the server prefetches for it: the server then locks the chunks and never "
            "unlocks them."
        ),
        # only in this release the scheduler's connector knows of the locks
        hooks_releases=("0.5.4",),
        text="read locks of the server",
        delay=5,
    ),
    "mp-apc-hit-not-stored": mp_scenarios(
        [
            admit("before", prompt(140)),
            run(),
            settle(),
            evict(8),  # vLLM still has the prompt
            admit("r", prompt(270)),
            run(),
            settle(),
            expect_stored("r"),
        ],
        "LAB004",
        doc=(
            "vLLM has a prefix of the prompt that LMCache has not: as many tokens at the end of the prompt are never "
            "stored."
        ),
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-ended-ids-kept": mp_scenarios(
        [
            admit("r", prompt(20)),
            run(),
            *[step for number in range(80) for step in (admit(f"r{number}", prompt(20)), run())],
            expect_forgotten("r"),
        ],
        "KVR009",
        not_in_hooks=MEMORY,
        text="worker_adapter._returned_finished",
    ),
    "mp-failed-load-blames-others": mp_scenarios(
        # The load begins with a chunk of which vLLM has the first blocks. LMCache reports these blocks as failed too,
        # and another request runs on them. With kv_load_failure_policy=fail, vLLM's default, that request ends with an
        # error.
        [
            admit("other", prompt(90), max_tokens=20),  # five blocks, one chunk
            step(4),
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140)),  # vLLM has five blocks, the second chunk is loaded
            step(2),
            lose_loads(),
            expect_unharmed("other"),
            run(),
            settle(),
        ],
        "LAB005",
        request="other",
        kv_load_failure_policy="fail",
    ),
    "mp-failed-load-repoll": mp_scenarios(
        # The worker loses the server for a moment. These releases report this failure, but not others
        # (mp-retrieve-false).
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140), max_tokens=2),
            step(6),  # the load is in flight
            lose_loads(),
            run(60),
            settle(),
        ],
        "KVR010",
        doc=(
            "A load fails, and LMCache promises the same tokens again without loading them: the request waits for ever."
        ),
        wrong=">=0.4.5,<0.5.5",
        delay=4,
    ),
    "mp-failed-load-stores-ahead": mp_scenarios(
        # vLLM has 64 tokens, the cache 128. The load fails, and vLLM continues at token 64. The tracker still counts
        # the 128 tokens of the hit, so it stores tokens 128 to 192 when only 144 are computed.
        [
            admit("short", prompt(70)),
            run(),
            stored_elsewhere(prompt(128)),
            admit("r", prompt(300), max_tokens=2),
            step(2),
            lose_loads(),  # the load was in flight
            run(),
            settle(),
        ],
        "KVR008",
        max_num_batched_tokens=40,
    ),
    "mp-free-locks-salt": mp_scenarios(
        [
            admit("before", prompt(140), cache_salt="tenant"),
            run(),
            admit("r", prompt(140), cache_salt="tenant"),  # vLLM has all tokens of the hit
            run(),
            settle(),
        ],
        "KVR009",
        not_in_hooks=SERVER,
        text="read locks of the server",
        wrong=">=0.4.5,<0.5.1",
    ),
    "mp-freed-while-stored": mp_scenarios(
        # The store of the first chunk ends early. The last chunk is still copied when the request ends.
        [
            admit("r", prompt(256)),
            run_until_finished("r"),
            step(),  # the worker learns of the end, and answers
            keep_blocks(0),  # other requests take its blocks and write to them
            step(4),
            free_blocks(),
            settle(),
        ],
        "LAB001",
        hooks_rule="KVR009",
        text="is stored under their key",
        max_num_batched_tokens=16,
        delay=3,
    ),
    "mp-lookup-double-count": mp_scenarios(
        [
            stored_elsewhere(prompt(128)),
            keep_blocks(4),
            admit("r", prompt(800), max_tokens=2),
            step(4),  # the lookup, then three polls without enough blocks
            free_blocks(),
            run(),
            settle(),
        ],
        "KVR007",
        doc=(
            "Each poll of a waiting request counts its hit again as stored: the stores leave a hole, and no later "
            "token is hit."
        ),
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-lookup-for-nothing": mp_scenarios(
        # With `prompt_logprobs` vLLM reads no cache, and admits the request before the lookup is answered.
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
            run(),
            settle(),
        ],
        "KVR009",
        not_in_hooks=SERVER,
        text="read locks of the server",
        vllm=">=0.31.0",  # before, this request takes the promise of the connector
    ),
    "mp-lora-not-in-key": mp_scenarios(
        [
            admit("before", prompt(140), lora="one"),
            run(),
            admit("r", prompt(140), max_tokens=2, lora="other"),
            run(),
            settle(),
        ],
        "LAB001",
    ),
    "mp-preempt-store-overwrite": mp_scenarios(
        [
            admit("r", prompt(200), max_tokens=20),
            step(4),
            step(),  # computed and handed over; the server copies some steps later
            preempt("r"),
            keep_blocks(0),  # other requests take its blocks and write to them
            step(3),
            free_blocks(),
            run(),
            settle(),
        ],
        "LAB001",
        text="is stored under their key",
        wrong=">=0.4.5,<0.5.6",
        num_blocks=50,
        max_num_batched_tokens=1024,
        delay=3,
    ),
    "mp-prompt-embeds": mp_scenarios(
        [
            admit("before", None, embeddings=(140, 0.0)),
            run(),
            reset_prefix_cache(),
            admit("r", None, max_tokens=2, embeddings=(140, 1.0)),
            run(),
            admit("next", [7] * 140),
            run(),
            settle(),
        ],
        "LAB001",
    ),
    "mp-reset-keeps-external-cache": mp_scenarios(
        # LMCache's multi-process connector has `reset_cache` since 0.5.6, vLLM's copy does not have it. vLLM treats the
        # None of its base class as success (scheduler.py 0.32.0:2898).
        NEW_WEIGHTS,
        "LAB001",
        doc="A weight update does not reset the LMCache server, vLLM answers True, and old KV is hit.",
        text="the step reads token 0 of",
        wrong=">=0.4.5,<0.5.6",
        max_num_batched_tokens=128,
    ),
    "mp-retrieve-false": mp_scenarios(
        [stored_elsewhere(prompt(128)), admit("r", prompt(140), max_tokens=2), fail_load("r"), run(60), settle()],
        "LAB001",
        wrong=">=0.4.5,<0.5.5",
    ),
    "mp-session-stores-ahead": mp_scenarios(
        # 63 drafts were rejected in nine steps, and the tracker counts them as computed. The next step computes 64 of
        # the 200 input tokens, up to token 113. The tracker counts 176 and stores tokens 64 to 128.
        [
            admit("r", prompt(40), max_tokens=10, resumable=True),
            run(),
            add_input("r", prompt(200, seed=1)),
            step(3),
            run(),
            end_input("r"),
            settle(),
        ],
        "LAB001",
        hooks_rule="KVR008",
        text="other KV than that of tokens 64 on is stored under their key",
        max_num_batched_tokens=64,
        drafter="eagle",
        drafts=7,
        acceptance=0,
        lmcache={"mp.save_decode_cache": True},
    ),
    "mp-stats-assert": mp_scenarios(
        [
            admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": ASKS}}),
            abort("r"),
            admit("next", prompt(140)),  # if EngineCore is alive, it serves this request
            run(),
            settle(),
        ],
        "KVR011",
        text="Request tracker for request_id r not found",
    ),
}
