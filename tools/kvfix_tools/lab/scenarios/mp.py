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
        """A request is aborted while it is loaded: load and request are both reported done, and vLLM asserts on the
        second.

        vLLM frees the request at the first report and looks for it at the other (scheduler.py 0.32.0:3222-3235).""",
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140), max_tokens=4),
            step(5),
            abort("r"),
            admit("next", prompt(200)),  # if EngineCore lives, it serves the next one
            run(),
            settle(),
        ],
        "KVR011",
        text="update_from_output: AssertionError",
        delay=4,
    ),
    "mp-abort-before-alloc": mp_scenarios(
        """A request aborted between its lookup and its admission keeps the read locks of the server until they time
        out.""",
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
        # the connector lets the scheduler know of its locks only in these
        hooks_releases=("0.4.6", "0.5.4"),
        text="read locks of the server",
    ),
    "mp-abort-while-prefetching": mp_scenarios(
        """A request aborted while its prefetch runs: the server locks what it finds afterwards, and the lock is
        never freed.""",
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
        # the connector lets the scheduler know of its locks only in this one
        hooks_releases=("0.5.4",),
        text="read locks of the server",
        delay=5,
    ),
    "mp-apc-hit-not-stored": mp_scenarios(
        "A miss in the cache, a hit in vLLM: so many tokens at the end of the prompt are computed and not stored.",
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
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-ended-ids-kept": mp_scenarios(
        """The worker remembers the id of every request that has ended, and a request whose id comes again is never
        freed.""",
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
        """A load fails, and requests that only share computed blocks with it are failed with it.

        The load begins with a chunk of which vLLM has the first blocks; those are reported as failed too, and
        another request is running on them. With vLLM's default, `kv_load_failure_policy=fail`, that request ends
        with an error.""",
        [
            admit("other", prompt(90), max_tokens=20),  # five blocks, one chunk
            step(4),
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140)),  # five blocks are here, the second chunk is loaded
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
        """A request whose load failed is promised the same tokens again, they are never loaded, and it waits for ever.

        The worker loses the server for a moment: that is the failure that these releases report. (For the other
        they do not, see mp-retrieve-false.)""",
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140), max_tokens=2),
            step(6),  # the load is in flight
            lose_loads(),
            run(60),
            settle(),
        ],
        "KVR010",
        wrong=">=0.4.5,<0.5.5",
        delay=4,
    ),
    "mp-failed-load-stores-ahead": mp_scenarios(
        """After a failed load the store runs ahead of the compute: KV that was never computed is stored under valid
        keys.

        vLLM had 64 tokens, the cache 128; the load fails and vLLM goes on at 64. The tracker still counts the 128
        of the hit with what is scheduled, so it stores tokens 128 to 192 when 144 are computed. Every later hit on
        that chunk is wrong.""",
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
        "The locks of a request with a `cache_salt` are given back under another key, and held until they time out.",
        [
            admit("before", prompt(140), cache_salt="tenant"),
            run(),
            admit("r", prompt(140), cache_salt="tenant"),  # vLLM has all that is found
            run(),
            settle(),
        ],
        "KVR009",
        not_in_hooks=SERVER,
        text="read locks of the server",
        wrong=">=0.4.5,<0.5.1",
    ),
    "mp-freed-while-stored": mp_scenarios(
        """A request with two stores is reported done at the end of the first: its blocks are freed while they are
        copied.

        The first chunk is stored early and done; the last one is still being copied when the request ends.""",
        [
            admit("r", prompt(256)),
            run_until_finished("r"),
            step(),  # the worker hears of it, and answers
            keep_blocks(0),  # others take its blocks and write to them
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
        """Each poll of a waiting request counts its hit again as stored: a hole is left, and what follows is
        unreachable.""",
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
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-lookup-for-nothing": mp_scenarios(
        """A request that reads no cache is looked up all the same, and what it locks stays locked until that times out.

        With `prompt_logprobs` vLLM reads no cache. It admits the request before the lookup is answered.""",
        [
            stored_elsewhere(prompt(128)),
            admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
            run(),
            settle(),
        ],
        "KVR009",
        not_in_hooks=SERVER,
        text="read locks of the server",
        vllm=">=0.31.0",  # before, such a request takes what the connector has
    ),
    "mp-lora-not-in-key": mp_scenarios(
        "Two adapters share KV through the multi-process server: the name of a LoRA is no part of the cache key.",
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
        """A store is in flight, its request is preempted, others write to its blocks: their KV is stored under its
        keys.""",
        [
            admit("r", prompt(200), max_tokens=20),
            step(4),
            step(),  # computed and handed over; the server copies some steps later
            preempt("r"),
            keep_blocks(0),  # others take its blocks and write to them
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
        """Two prompts given as embeddings of the same length share KV: their key is made of the zeros that stand
        for tokens.""",
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
        """New weights, and vLLM answers that the connector's cache was reset: the server keeps all, and old KV is hit.

        The multi-process connector has no `reset_cache` before LMCache 0.5.6; vLLM's copy has none. vLLM takes the
        None of its base class for success (scheduler.py 0.32.0:2898).""",
        NEW_WEIGHTS,
        "LAB001",
        text="the step reads token 0 of",
        wrong=">=0.4.5,<0.5.6",
        max_num_batched_tokens=128,
    ),
    "mp-retrieve-false": mp_scenarios(
        """A load that failed is reported as done without its blocks: vLLM reads what was never loaded. Wrong text,
        no error.""",
        [stored_elsewhere(prompt(128)), admit("r", prompt(140), max_tokens=2), fail_load("r"), run(60), settle()],
        "LAB001",
        wrong=">=0.4.5,<0.5.5",
    ),
    "mp-session-stores-ahead": mp_scenarios(
        """A session that gets input counts rejected drafts as computed: a chunk is stored before it is computed.

        Nine steps have had 63 drafts rejected. Of the input's 200 tokens the next step computes 64, up to token
        113. The tracker counts 176, and has tokens 64 to 128 stored.""",
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
        "A client that asks for cache statistics and goes away before its lookup kills EngineCore.",
        [
            admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": ASKS}}),
            abort("r"),
            admit("next", prompt(140)),  # if EngineCore is alive, it serves the next one
            run(),
            settle(),
        ],
        "KVR011",
        text="Request tracker for request_id r not found",
    ),
}
