"""Scenarios of LMCache's multi-process connector. `mp_scenarios` also plays vLLM's copy of this connector."""

from dataclasses import replace
from functools import partial
from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import MEMORY, SERVER, Options, Scenario, mp_scenarios, scenario
from kvfix_tools.lab.steps import prompt

ASKS = {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}
STORES_DECODE = {"mp.save_decode_cache": True}
MP = partial(Options, connector="mp")
mp = partial(scenario, options=MP(num_blocks=60, max_num_batched_tokens=256))
windows = partial(scenario, needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"}, options=MP(num_blocks=60, windows=(64,)))
states = partial(scenario, needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"})
silent = partial(scenario, needs={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"})
NEW_WEIGHTS = (do.serve("first", prompt(128), max_tokens=4), do.new_weights(), do.admit("r", prompt(200), max_tokens=4))


def _window_freed(max_tokens: int, doc: str) -> Scenario:
    """Return a scenario of a store that is in flight when vLLM frees the blocks before the window."""
    return windows(
        [do.admit("r", prompt(256), max_tokens=max_tokens), do.step()],
        # one step after "r", "other" takes the blocks before the window of "r", and writes to them
        do.admit("other", prompt(288, seed=1)),
        doc=doc,
        shows="LAB001 is stored with wrong KV",
        hooks_rule="KVR014",
        options=MP(num_blocks=60, windows=(64,), max_num_batched_tokens=1024, delay=4),
    )


def _null_state(tokens: int, options: dict[str, Any], **more: Any) -> Scenario:
    """Return a scenario in which a stored chunk lacks its Mamba state. A prompt of `tokens` tokens hits the chunk."""
    return states(
        [do.store("first", prompt(110)), do.admit("short", prompt(tokens))],
        shows="LAB001 in KV group 1",
        options=MP(max_num_batched_tokens=48, states=True, **options),
        **more,
    )


SCENARIOS: dict[str, Any] = {
    # ------------------------------------------------------------------ bugs that vLLM's copy has too
    "kv-xfer-finished-assert": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=4), do.step(5), do.abort("r")],
        do.admit("next", prompt(200)),  # if EngineCore is alive, it serves this request
        shows="KVR011 update_from_output: AssertionError",
        options={"delay": 4},
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
        options={"delay": 5},
    ),
    "mp-apc-hit-not-stored": mp_scenarios(
        [do.serve("before", prompt(140)), do.settle(), do.evict(8)],  # LMCache loses the prompt, vLLM keeps the prompt
        [do.serve("r", prompt(270)), do.settle(), do.expect_stored("r")],
        shows="LAB004",
        doc="If vLLM has cached N tokens that LMCache lacks, LMCache never stores the last N tokens of the prompt.",
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-ended-ids-kept": mp_scenarios(
        [do.serve("r", prompt(20)), *[do.serve(f"r{n}", prompt(20)) for n in range(80)], do.expect_forgotten("r")],
        shows="KVR009 worker_adapter._returned_finished",
        not_in_hooks=MEMORY,
    ),
    "mp-failed-load-blames-others": mp_scenarios(
        # With kv_load_failure_policy=fail, vLLM's default, "other" ends with an error.
        do.admit("other", prompt(90), max_tokens=20),  # "other" fills five blocks and one chunk
        [do.step(4), do.stored_elsewhere(prompt(128))],
        do.admit("r", prompt(140)),  # vLLM has five blocks of the prompt, and the second chunk is loaded
        [do.step(2), do.lose_loads(), do.expect_unharmed("other")],
        shows="LAB005",
        options={"kv_load_failure_policy": "fail"},
    ),
    "mp-failed-load-repoll": mp_scenarios(
        # The server briefly does not answer. LMCache reports this failure, but not the failure in mp-retrieve-false.
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=2)],
        do.step(6),  # the load is in flight
        do.lose_loads(),
        shows="KVR010",
        doc="A load fails, and LMCache promises the same tokens again without a load: the request waits for ever.",
        wrong=">=0.4.5,<0.5.5",
        options={"delay": 4},
    ),
    "mp-failed-load-stores-ahead": mp_scenarios(
        # vLLM caches 64 tokens, the server 128 tokens. The load fails, and vLLM continues at token 64. LMCache still
        # counts the 128 tokens of the hit, so LMCache stores tokens 128 to 192 when only 144 tokens are computed.
        [do.serve("short", prompt(70)), do.stored_elsewhere(prompt(128))],
        [do.admit("r", prompt(300), max_tokens=2), do.step(2), do.lose_loads()],  # the load was in flight
        shows="KVR008",
        options={"max_num_batched_tokens": 40},
    ),
    "mp-free-locks-salt": mp_scenarios(
        do.serve("before", prompt(140), cache_salt="tenant"),
        do.admit("r", prompt(140), cache_salt="tenant"),  # vLLM has all tokens of the hit
        shows="KVR009 read locks of the server",
        not_in_hooks=SERVER,
        wrong=">=0.4.5,<0.5.1",
    ),
    "mp-freed-while-stored": mp_scenarios(
        # When the request ends, the store of the first chunk has ended, and the server still copies the last chunk.
        [do.admit("r", prompt(256)), do.run_until_finished("r")],
        do.step(),  # the worker learns that "r" has ended, and reports all stores of "r" as done
        do.keep_blocks(0),  # other requests take the blocks of "r" and write to them
        [do.step(4), do.free_blocks()],
        shows="LAB001 is stored with wrong KV",
        hooks_rule="KVR009",
        options={"max_num_batched_tokens": 16, "delay": 3},
    ),
    "mp-lookup-double-count": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.keep_blocks(4), do.admit("r", prompt(800), max_tokens=2)],
        do.step(4),  # the first step sends the lookup. Three steps repeat the lookup, because too few blocks are free
        do.free_blocks(),
        shows="KVR007",
        doc="Each poll of a waiting request adds its hit to the stored tokens. LMCache never stores the next tokens.",
        wrong=">=0.4.5,<0.5.6",
    ),
    "mp-lookup-for-nothing": mp_scenarios(
        # With `prompt_logprobs` vLLM reads no cache, and admits the request before the lookup is answered.
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1})],
        shows="KVR009 read locks of the server",
        not_in_hooks=SERVER,
        vllm=">=0.31.0",  # earlier releases take the hit of the connector for this request
    ),
    "mp-lora-not-in-key": mp_scenarios(
        [do.serve("before", prompt(140), lora="one"), do.admit("r", prompt(140), max_tokens=2, lora="other")],
        shows="LAB001",
    ),
    "mp-preempt-store-overwrite": mp_scenarios(
        [do.admit("r", prompt(200), max_tokens=20), do.step(4)],
        do.step(),  # the worker hands the store to the server, which copies some steps later
        [do.preempt("r"), do.keep_blocks(0)],  # other requests take the blocks of "r" and write to them
        [do.step(3), do.free_blocks()],
        shows="LAB001 is stored with wrong KV",
        wrong=">=0.4.5,<0.5.6",
        options={"num_blocks": 50, "max_num_batched_tokens": 1024, "delay": 3},
    ),
    "mp-prompt-embeds": mp_scenarios(
        do.store("before", None, embeddings=(140, 0.0)),
        [do.serve("r", None, max_tokens=2, embeddings=(140, 1.0)), do.admit("next", [7] * 140)],
        shows="LAB001",
    ),
    "mp-reset-keeps-external-cache": mp_scenarios(
        NEW_WEIGHTS,
        shows="LAB001 the step reads token 0 of",
        doc="A weight update does not reset the LMCache server, but vLLM returns True. Requests then hit old KV.",
        wrong=">=0.4.5,<0.5.6",
        options={"max_num_batched_tokens": 128},
    ),
    "mp-retrieve-false": mp_scenarios(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140), max_tokens=2), do.fail_load("r")],
        shows="LAB001",
        wrong=">=0.4.5,<0.5.5",
    ),
    "mp-session-stores-ahead": mp_scenarios(
        # 63 drafts were rejected in nine steps, and LMCache counts them as computed. The next step computes 64 of
        # the 200 input tokens, up to token 113. LMCache counts 176 tokens, and stores tokens 64 to 128.
        [do.serve("r", prompt(40), max_tokens=10, resumable=True), do.add_input("r", prompt(200, seed=1))],
        [do.step(3), do.run(), do.end_input("r")],
        shows="LAB001 the chunk that begins at token 64 is stored with wrong KV",
        hooks_rule="KVR008",
        options={"max_num_batched_tokens": 64, "drafter": "eagle", "drafts": 7, "lmcache": STORES_DECODE},
    ),
    "mp-stats-assert": mp_scenarios(
        [do.admit("r", prompt(140), sampling={"extra_args": {"kv_transfer_params": ASKS}}), do.abort("r")],
        do.admit("next", prompt(140)),  # if EngineCore is alive, it serves this request
        shows="KVR011 Request tracker for request_id r not found",
    ),
    # ------------------------------------------------------------------ failures of the server, and single releases
    "mp-heartbeat-never-starts": mp(
        [do.stored_elsewhere(prompt(128)), do.admit("before", prompt(140, seed=1)), do.step()],
        [do.lookup_times_out(), do.run(), do.step()],  # with a heartbeat, the adapter would trust the server again
        [do.serve("r", prompt(140)), do.settle(), do.expect_hit("r")],
        shows="LAB006",
        not_in_hooks=SERVER,
        wrong={"lmcache": ">=0.5.0,<0.5.6"},
    ),
    "mp-idle-worker-forgotten": mp(
        [do.stored_elsewhere(prompt(128)), do.hour_of_silence(), do.admit("r", prompt(200))],
        shows="LAB002",
        wrong={"lmcache": ">=0.5.0"},
    ),
    "mp-load-after-given-up": silent(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140))],
        do.step(5),  # the hit is found, vLLM allocates blocks, and the load is in flight
        [do.server_stops(), do.step(2)],  # the worker reports that the load has failed; vLLM frees the blocks
        do.admit("other", prompt(200, seed=1), max_tokens=10),
        [do.admit("another", prompt(200, seed=2), max_tokens=10), do.step(2), do.server_goes_on()],
        doc="The worker drops the load of a slow server, and the server writes into blocks of other requests.",
        shows="LAB001 computed ones, its slot holds other KV",
        options=MP(num_blocks=28, max_num_batched_tokens=1024, delay=3),
    ),
    "mp-load-not-granted": mp(
        # With `prompt_logprobs` vLLM reads no cache. vLLM still asks the connector, and then takes 0 tokens.
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1})],
        shows="KVR004",
        # before 0.31, vLLM takes the hit of the connector for this request
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.4.5,<0.5.5"},
        options=MP(num_blocks=60, max_num_batched_tokens=256, delay=0),
    ),
    "mp-preempted-while-silent": silent(
        [do.admit("r", prompt(200), max_tokens=20), do.step(5)],  # the worker hands the store to the server
        [do.server_stops(), do.step()],  # the worker believes that the server is dead
        [do.preempt("r"), do.keep_blocks(0)],  # other requests take the blocks of "r" and write to them
        [do.step(2), do.server_goes_on(), do.step(4), do.free_blocks()],
        doc="A slow server misses a heartbeat: the worker does not wait for the store of a preempted request.",
        shows="LAB001 is stored with wrong KV",
        options=MP(num_blocks=50, max_num_batched_tokens=1024, delay=9),
    ),
    "mp-reset-keeps-what-is-in-flight": mp(
        do.admit("r", prompt(200), max_tokens=4),
        do.step(3),  # the lookup is answered, the prompt is computed, and its store is in flight
        do.new_weights(),
        shows="LAB001 the chunk that begins at token 0 is stored with wrong KV",
        needs={"lmcache": ">=0.5.6", "vllm": ">=0.22.0"},
        options=MP(num_blocks=60, max_num_batched_tokens=256, delay=2),
    ),
    "mp-resume-load-circle": mp(
        [do.admit("r", prompt(140), max_tokens=8), do.step(6), do.preempt("r")],
        do.keep_blocks(0),  # when the request resumes, vLLM's prefix cache has none of its blocks
        [do.step(), do.free_blocks(), *[do.fail_load("r"), do.step()] * 40, do.expect_all_ended()],
        doc="The load of a preempted request fails again and again, and the request never runs.",
        shows="LAB003",
        wrong={"lmcache": ">=0.5.6"},
    ),
    "mp-store-after-given-up": silent(
        [do.admit("r", prompt(200)), do.step(6)],  # the request ends; vLLM keeps its blocks until the store is done
        [do.server_stops(), do.step(2)],  # the worker reports that the store is done; vLLM frees the blocks
        do.keep_blocks(0),  # other requests take these blocks and write to them
        [do.step(), do.server_goes_on(), do.step(4), do.free_blocks()],
        doc="A slow server misses a heartbeat: the worker drops its store, and the server stores KV of other requests.",
        shows="LAB001 is stored with wrong KV",
        options=MP(num_blocks=50, max_num_batched_tokens=1024, delay=5),
    ),
    # ------------------------------------------------------------------ models with several KV groups
    "mp-failed-load-of-groups": windows(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(200), max_tokens=2), do.step(2)],
        do.lose_loads(),  # the load was in flight
        [do.run(), do.expect_unharmed("r")],
        shows="KVR011 RuntimeError",
        wrong={"lmcache": ">=0.4.7,<0.5.6", "vllm": ">=0.32"},
    ),
    "mp-state-freed-while-stored": states(
        do.admit("r", prompt(256), max_tokens=2),
        doc="While LMCache stores a state, vLLM frees its block, and the request writes a later state to the block.",
        shows="LAB001 is stored with wrong KV",
        not_in_hooks="the block is used again after the next step, when the store may have ended",
        options=MP(
            num_blocks=24, chunk_size=16, max_num_batched_tokens=16, states=True, separate_object_groups=True, delay=20
        ),
    ),
    # Each step fills three blocks. The server stores all three blocks, but only the third block has a state.
    "mp-state-kept-null": _null_state(40, {"chunk_size": 16}),
    # A chunk has two blocks. vLLM keeps a state at the end of each step, here after 48 and 96 tokens, in the third and
    # the sixth block. The second chunk has the third block and the fourth block. The fourth block is null.
    "mp-state-stored-null": _null_state(70, {"chunk_size": 32, "separate_object_groups": True}, hooks_rule="KVR014"),
    "mp-window-freed-at-end": _window_freed(
        1, "A request ends while its store is in flight: another request writes to blocks before the window."
    ),
    "mp-window-freed-while-stored": _window_freed(
        20, "The window moves on while a store is in flight: another request writes to the freed blocks."
    ),
    "mp-window-loaded-short": windows(
        # With three MTP modules, vLLM keeps the window of 32 tokens and two tokens before the window. LMCache loads the
        # last two blocks of the hit of "r". The two tokens are in the third-last block (tokens 80 to 96). vLLM caches
        # that block, but LMCache does not load it. "other" hits 112 tokens, only in vLLM, and reads from token 81.
        [do.stored_elsewhere(prompt(128)), do.serve("r", prompt(160), max_tokens=2), do.lookups_fail(1)],
        do.admit("other", prompt(128) + prompt(40, seed=1), max_tokens=2),
        shows="LAB001 in KV group 1",
        options=MP(num_blocks=60, windows=(32,), drafter="mtp", drafts=3, acceptance=50),
    ),
    "mp-window-reserves-too-little": scenario(
        # LMCache loads 256 of 320 tokens: 16 blocks of full attention, and one block of the window after 15 null
        # blocks. The last 64 tokens need 4 blocks in each KV group. Before vLLM admits the load of "other", vLLM
        # reserves only 4 blocks for "r". The two loads take 34 of 39 blocks, so 5 blocks stay free.
        [do.stored_elsewhere(prompt(256)), do.stored_elsewhere(prompt(256, seed=1))],
        [do.admit("r", prompt(320), max_tokens=2), do.admit("other", prompt(320, seed=1), max_tokens=2)],
        shows="LAB009 1 request is loaded and waits behind r, which needs 8 blocks; 5 are free",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.7"},
        options=MP(num_blocks=40, windows=(16,), max_num_batched_tokens=64),
    ),
    "mp-window-stored-late": scenario(
        # vLLM caches 64 tokens, the server 128 tokens. After a failed load, LMCache stores each chunk 64 tokens late.
        [do.serve("short", prompt(65)), do.stored_elsewhere(prompt(128))],
        [do.admit("r", prompt(400), max_tokens=2), do.step(2), do.lose_loads()],  # the load was in flight
        doc="After a failed load LMCache stores each chunk too late: other requests have the window's blocks by then.",
        shows="LAB001 is stored with wrong KV",
        needs={"lmcache": ">=0.5.6", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=MP(num_blocks=32, windows=(64,), max_num_batched_tokens=16),
    ),
    "mp-window-stored-null": windows(
        # After a prefix hit, the block list of "r" in KV group 1 begins with null blocks. "short" loads chunk 0.
        [do.serve("first", prompt(256)), do.evict(4), do.store("r", prompt(512)), do.admit("short", prompt(100))],
        doc="LMCache stores an evicted prefix again, but the window's KV group has null blocks for this prefix.",
        shows="LAB001 the step reads token",
        hooks_rule="KVR014",
    ),
}
SCENARIOS["mp-silent-server-given-up"] = replace(
    SCENARIOS["mp-load-after-given-up"],
    doc="",  # without a doc, the lab shows the title of KVF904
    wrong={"vllm": ">=0.22.0", "lmcache": ">=0.4.5,<0.5"},
    needs={"lmcache": "<0.5"},
)
