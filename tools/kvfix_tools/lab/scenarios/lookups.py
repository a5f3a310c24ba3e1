"""Scenarios of LMCache's in-process connector. A lookup is repeated, times out, is aborted, or gets a late answer."""

from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import LARGE, WORKER, Options, large_chunks, scenario
from kvfix_tools.lab.steps import prompt

LONG = "long"
#: A lookup times out after 3,000 ms. In this file, match(n) is get_num_new_matched_tokens with n computed tokens.
TIMED_OUT = do.step(), do.wait(4), do.step()
FETCH = {"enable_async_loading": True}
OPTIONS = Options(lmcache=FETCH, max_num_batched_tokens=512)
asynchronous = partial(scenario, needs={"lmcache": ">=0.3.10"}, options=OPTIONS)
only_0_3_10 = partial(scenario, wrong={"lmcache": "==0.3.10"})

SCENARIOS = {
    "abort-while-waiting": large_chunks(
        [do.store("before", prompt(600)), do.keep_blocks(0), do.admit("r", prompt(600), max_tokens=2)],
        [do.step(), do.abort("r"), do.free_blocks()],
        doc="A request is aborted before its admission: LMCache keeps its LoadSpec, hit, priority and pins.",
        shows="KVR009",
        wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    ),
    "async-abort-keeps-lookup": asynchronous(
        [do.admit("r", prompt(300), max_tokens=8), do.step(2), do.abort("r"), do.admit("next", prompt(300, seed=1))],
        shows="KVR009 lookup_client.aborted_lookups",
        wrong={"lmcache": ">=0.3.10,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    ),
    "async-abort-while-other-loads": scenario(
        [do.serve("first", prompt(300)), do.step(3), do.reset_prefix_cache(), do.admit("r", prompt(300), max_tokens=2)],
        do.step(2),  # LMCache has fetched the hit, but vLLM lets the OffloadingConnector load
        do.abort("r"),
        doc="A request is aborted while OffloadingConnector loads for it: LMCache keeps the chunks that it fetched.",
        shows="KVR009 fetched chunks of the worker",
        options=Options(lmcache=FETCH, offloading="first", delay=3, max_num_batched_tokens=512),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "async-fetched-left": asynchronous(
        # With LMCache 0.3.10 the engine dies before the worker keeps a chunk (mismatch-in-tokens-to-load).
        [do.serve("first", prompt(300)), do.admit("r", prompt(300))],
        shows="KVR009 fetched chunks of the worker",
        not_in_hooks=WORKER,
        wrong={"lmcache": ">=0.3.10.post1,<0.4.1"},
    ),
    "async-given-up-asked-again": asynchronous(
        [do.stored_elsewhere(prompt(256)), do.slow_lookups(6), do.admit("r", prompt(300), max_tokens=5)],
        [TIMED_OUT, do.preempt("r")],
        doc="A lookup times out and the request is preempted. The late result is never released.",
        shows="KVR009 fetched chunks of the worker",
        needs={"lmcache": ">=0.3.11"},  # in 0.3.10 the engine dies when the request resumes
    ),
    "async-given-up-of-one-rank": scenario(
        # The client counts answers per request id: a late answer to the second lookup counts for the third lookup.
        [do.stored_elsewhere(prompt(256)), do.lookups_fail(1), do.admit("r", prompt(300), max_tokens=5)],
        [TIMED_OUT, do.preempt("r"), do.reset_prefix_cache()],
        do.step(),  # match(0): LMCache sends the lookup, and both ranks answer
        do.slow_lookups(3),  # the second rank answers later
        doc="One of two ranks answers a lookup late, the request is preempted, and a worker dies when it loads.",
        shows="KVR011 is not done or not found",
        options=Options(lmcache=FETCH, max_num_batched_tokens=512, ranks=2),
        # up to LMCache 0.3.15, only the first rank releases chunks; vLLM before 0.32 was not tested with two ranks
        needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
    ),
    "async-late-answer-left": asynchronous(
        [do.stored_elsewhere(prompt(256)), do.slow_lookups(3), do.admit("r", prompt(300))],
        [TIMED_OUT, do.slow_lookups(0)],
        do.serve("next 1", prompt(300, seed=1)),  # the late answer arrives
        do.admit("next 2", prompt(300, seed=2)),  # with KVF011, one of the last two lookups removes the late answer
        doc="A lookup times out and the request ends without it: LMCache keeps the late answer and the fetched chunks.",
        shows="KVR009 fetched chunks of the worker",
        not_in_hooks=WORKER,
        wrong={"lmcache": ">=0.3.10,<0.4.1"},
    ),
    "async-lookup-of-configured": asynchronous(
        do.stored_elsewhere(prompt(256)),
        do.serve("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
        do.expect_hit("r"),
        shows="LAB006",
        options=Options(lmcache=FETCH),
    ),
    "async-lookup-timeout": asynchronous(
        [do.slow_lookups(99), do.keep_blocks(0), do.admit("r", prompt(300)), do.step()],  # match(0): the lookup is sent
        do.step(),  # match(0): the answer is not known yet
        do.wait(4),  # four seconds without an answer of the worker; lookup_timeout_ms is 3,000
        do.step(),  # match(0): the lookup has timed out, so the answer is 0; no blocks are free
        do.step(),  # vLLM calls match(0) again
        do.free_blocks(),
        doc="A lookup times out while no blocks are free: the next `get_num_new_matched_tokens` raises KeyError.",
        shows="KVR011 schedule: KeyError: 'r'",
    ),
    "consumer-pins-left": scenario(
        [do.stored_elsewhere(prompt(512)), do.admit("r", prompt(600), max_tokens=2)],
        shows="KVR009 pins of the worker",
        wrong={"lmcache": "<0.4.3"},
        options=Options(chunk_size=256, max_num_batched_tokens=1024, kv_role="kv_consumer"),
    ),
    "dead-worker-stalls-lookups": large_chunks(
        # vLLM has no blocks for the request, so vLLM repeats the lookup in every step.
        [do.lookups_fail(4), do.keep_blocks(0), do.admit("r", prompt(300)), do.step(4), do.free_blocks()],
        shows="KVR012",
    ),
    "full-hit-asked-twice": only_0_3_10(
        # LMCache first answers 199, then 200. vLLM's assertion num_new_tokens > 0 fails (scheduler.py 0.32.0:1170).
        [do.store("before", prompt(200)), do.keep_blocks(0), do.admit("r", prompt(200), max_tokens=2)],
        do.step(),  # match(0): answered by a lookup
        do.step(),  # match(0): answered from the lookup cache
        do.free_blocks(),
        doc="LMCache has the whole prompt, and its second answer promises all tokens, so no token is left to compute.",
        shows="KVR001",
        options=Options(block_size=8, num_blocks=40, chunk_size=40, max_num_batched_tokens=256),
    ),
    "lookup-skips-computed": large_chunks(
        # LMCache has evicted 256 tokens. vLLM still caches these tokens, but has too few free blocks for the request.
        # Later, other requests take the blocks of the 256 tokens. LMCache then loads fewer tokens than it promised.
        [do.serve("before", prompt(300)), do.evict(9), do.keep_blocks(20)],  # these 20 blocks include the cached prefix
        [do.admit("r", prompt(600)), do.step()],  # match(288): LMCache counts the first 256 tokens as a hit
        [do.keep_blocks(0), do.step()],  # match(0): the lookup cache promises 256
        do.free_blocks(),
        shows="LAB002",
        wrong={"lmcache": ">=0.3.10.post2,<0.3.12"},
    ),
    "max-load-unaligned": scenario(
        # vLLM has 80 tokens. LMCache promises 1,024 more, but its LoadSpec covers only the tokens from 80 to 1,024.
        [do.store("before", prompt(1500)), do.serve("short", prompt(80)), do.admit("r", prompt(1500), max_tokens=2)],
        shows="KVR011 Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens in vllm)",
        options=LARGE(num_blocks=120, lmcache={"max_tokens_per_load": 1024}),
        needs={"lmcache": ">=0.4.7"},
    ),
    "mismatch-in-tokens-to-load": only_0_3_10(
        # A prompt has 10,009 tokens, a block 16, and a chunk 256. One step computes 336 tokens (21 full blocks), and
        # LMCache stores one chunk. The next step computes one more token, in block 22. When the request is preempted,
        # its 21 full blocks stay in the prefix cache. While too few blocks are free, vLLM calls match in every step. A
        # lookup answers the first call with 0. The lookup cache answers the later calls.
        # "other" has 637 of the 659 usable blocks. After three generated tokens, these 637 blocks are full.
        [do.admit("other", prompt(10190, seed=1), max_tokens=6), do.step()],
        [do.admit(LONG, prompt(10009, seed=2), max_tokens=2), do.budget(1 + 336), do.step(), do.budget(1 + 1)],
        do.step(),  # the long request gets the last free block as its 22nd block
        [do.budget(16384), do.step()],  # "other" needs a block, so vLLM preempts the long request
        do.step(),  # match(336): answered by a lookup; too few blocks
        do.step(),  # match(336): answered from the lookup cache; too few blocks; "other" ends
        doc="LMCache issue 2158: LMCache promises 256 tokens although vLLM has computed 336, and EngineCore dies.",
        shows="KVR011 Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full "
        f"lmcache hits subtracts last token to recalculate logits) for request {LONG}",
        options=LARGE(num_blocks=660, max_num_batched_tokens=16384, max_model_len=12288, reserve_full_isl=False),
    ),
    "raw-hit-beyond-request": only_0_3_10(
        # The request has 1,101 tokens. LMCache has 1,024, and after a preemption vLLM's prefix cache has 800. LMCache
        # answers 224, then 1,024. vLLM's assertion fails for 1,824 tokens (v1/core/sched/scheduler.py 0.32.0:1048).
        [do.admit("r", prompt(1100), max_tokens=8), do.step(), do.preempt("r")],
        do.keep_blocks(50),  # 50 of the 69 blocks of "r" stay in the prefix cache: 800 tokens
        do.step(),  # match(800): answered by a lookup
        do.step(),  # match(800): answered from the lookup cache
        do.free_blocks(),
        doc="The lookup cache promises the whole hit, although hit plus computed tokens exceed the request's length.",
        shows="KVR001",
        options=LARGE(),
    ),
    "reused-id-gets-dead-hit": large_chunks(
        [do.store("before", prompt(600)), do.keep_blocks(0), do.admit("r", prompt(600), max_tokens=2), do.step()],
        [do.abort("r"), do.step(), do.free_blocks()],
        do.admit("r", prompt(700, seed=5), max_tokens=2),  # another prompt, without a cached chunk
        doc="A request reuses the id of an aborted request: LMCache promises the hit of the aborted request.",
        shows="LAB002",
        wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    ),
}
