"""Lookups of LMCache's in-process connector: asked twice, given up, aborted, answered late."""

from kvfix_tools.lab.scenario import WORKER, Options, Scenario
from kvfix_tools.lab.steps import (
    abort,
    admit,
    budget,
    evict,
    expect_hit,
    free_blocks,
    keep_blocks,
    lookups_fail,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    slow_lookups,
    step,
    stored_elsewhere,
    wait,
)

LONG = "long"

SCENARIOS = {
    "abort-while-waiting": Scenario(
        doc="""A request aborted after its lookup and before its admission leaves LoadSpec, hit, priority and pins
        behind.

        The pins keep chunks from being evicted until they time out (300 s).""",
        schedule=[
            admit("before", prompt(600)),
            run(),
            reset_prefix_cache(),
            keep_blocks(0),
            admit("r", prompt(600), max_tokens=2),
            step(),
            abort("r"),
            free_blocks(),
            settle(),
        ],
        rule="KVR009",
        wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "async-abort-keeps-lookup": Scenario(
        doc="""Every client that goes away leaves its request's id in the asynchronous lookup client, for ever.

        `request_finished` cancels the lookup of an aborted request, also if none is in flight: the id goes to
        `aborted_lookups` and waits for an answer that was given long ago (lmcache_async_lookup_client.py
        0.5.6:267-280).""",
        schedule=[
            admit("r", prompt(300), max_tokens=8),
            step(2),
            abort("r"),
            admit("next", prompt(300, seed=1)),
            run(),
            settle(),
        ],
        rule="KVR009",
        text="lookup_client.aborted_lookups",
        wrong={"lmcache": ">=0.3.10,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
        needs={"lmcache": ">=0.3.10"},
    ),
    "async-abort-while-other-loads": Scenario(
        doc="""A request is aborted while the OffloadingConnector loads for it: what LMCache has fetched for it is kept
        for ever.

        A MultiConnector asks both, and LMCache's lookup fetches. Only a step with the request in it releases that.""",
        schedule=[
            admit("first", prompt(300)),
            run(),
            step(3),
            reset_prefix_cache(),
            admit("r", prompt(300), max_tokens=2),
            step(2),  # looked up; the OffloadingConnector is granted the load
            abort("r"),
            settle(),
        ],
        rule="KVR009",
        text="fetched chunks of the worker",
        wrong={"lmcache": ">=0.5.6"},
        options=Options(
            lmcache={"enable_async_loading": True}, offloading="first", delay=3, max_num_batched_tokens=512
        ),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "async-fetched-left": Scenario(
        doc="""Chunks fetched ahead for a request that then loads nothing are never let go: the cache fills up with
        them.

        vLLM has as much of the prompt as LMCache, so nothing is promised and nothing loaded; the fetched chunks
        keep their references and pins (LMCache PR 2559). 0.3.10 dies before that, of what
        mismatch-in-tokens-to-load shows.""",
        schedule=[admit("first", prompt(300)), run(), admit("r", prompt(300)), run(), settle()],
        rule="KVR009",
        not_in_hooks=WORKER,
        text="fetched chunks of the worker",
        wrong={"lmcache": ">=0.3.10.post1,<0.4.1"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
        needs={"lmcache": ">=0.3.10"},
    ),
    "async-given-up-asked-again": Scenario(
        doc="""A lookup is given up, and its request preempted and looked up again: what is fetched for it at last is
        kept for ever.

        With asynchronous loading both lookups have the request's id. The answer to the first one is cleaned up
        while the second is in flight, so a third is sent (lmcache_async_lookup_client.py 0.5.6:251 and 163).""",
        schedule=[
            stored_elsewhere(prompt(256)),
            slow_lookups(6),
            admit("r", prompt(300), max_tokens=5),
            step(),  # match(0): the lookup is sent
            wait(4),  # lookup_timeout_ms is 3,000
            step(),  # match(0): given up; computed
            preempt("r"),
            run(),
            settle(),
        ],
        rule="KVR009",
        text="fetched chunks of the worker",
        wrong={"lmcache": ">=0.3.11"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
        needs={"lmcache": ">=0.3.11"},  # in 0.3.10 a resumed request ends the engine before that
    ),
    "async-given-up-of-one-rank": Scenario(
        doc="""A lookup that one of two ranks has not answered is given up; the request is preempted, and a worker dies
        of its load.

        With asynchronous loading the first rank's answers to two lookups of the request count as one of each rank.
        What that comes to is cleaned up, as of the first lookup, and a third is sent. The second rank's answer to
        the second lookup and the first one's to the third begin the load before the second rank has fetched
        (lmcache_async_lookup_client.py 0.5.6:233-246).""",
        schedule=[
            stored_elsewhere(prompt(256)),
            lookups_fail(1),
            admit("r", prompt(300), max_tokens=5),
            step(),  # match(0): the lookup is sent
            wait(4),  # lookup_timeout_ms is 3,000
            step(),  # match(0): given up; computed
            preempt("r"),
            reset_prefix_cache(),
            step(),  # match(0): the lookup is sent, and answered by both ranks
            slow_lookups(3),  # of the second rank
            run(),
            settle(),
        ],
        rule="KVR011",
        text="is not done or not found",
        request="",
        wrong={"lmcache": ">=0.4.1"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512, ranks=2),
        # up to 0.3.15 the second rank does not clean up; several ranks were not tried with earlier releases of vLLM
        needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
    ),
    "async-late-answer-left": Scenario(
        doc="""A lookup is given up, the request is served without it and ends; then the answer comes: it is kept,
        chunks and all.

        With asynchronous loading the client gives up after `lookup_timeout_ms`, the worker goes on. The lookup is
        not cancelled (it is since 0.4.1): the late answer is kept for a request that has ended, and so is what was
        fetched.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            slow_lookups(3),
            admit("r", prompt(300)),
            step(),  # match(0): the lookup is sent
            wait(4),  # lookup_timeout_ms is 3,000
            step(),  # match(0): given up; computed, and it ends
            slow_lookups(0),
            admit("next 1", prompt(300, seed=1)),  # the answer comes; other lookups would clean up
            run(),
            admit("next 2", prompt(300, seed=2)),
            run(),
            settle(),
        ],
        rule="KVR009",
        not_in_hooks=WORKER,
        text="fetched chunks of the worker",
        wrong={"lmcache": ">=0.3.10,<0.4.1"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
        needs={"lmcache": ">=0.3.10"},
    ),
    "async-lookup-of-configured": Scenario(
        doc="""With asynchronous loading a request that asks for `lmcache.skip_save` waits until its lookup is given up.

        The worker cannot decode the message of the lookup, for the setting is no text, and never answers.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
            run(),
            expect_hit("r"),
            settle(),
        ],
        rule="LAB006",
        wrong={"lmcache": ">=0.3.10"},
        options=Options(lmcache={"enable_async_loading": True}),
        needs={"lmcache": ">=0.3.10"},
    ),
    "async-lookup-timeout": Scenario(
        doc="""A lookup takes too long, and the next question about the request kills EngineCore: KeyError.

        With asynchronous loading the client gives up after `lookup_timeout_ms`: it answers 0 and forgets when the
        lookup began; the lookup still counts as in flight. If no blocks are free for the request in this step, vLLM
        asks again in the next, and the client looks for the time that it has forgotten
        (lmcache_async_lookup_client.py 0.5.6:174, :187). LMCache issue 3685; PR 3766 is open.""",
        schedule=[
            slow_lookups(99),
            keep_blocks(0),
            admit("r", prompt(300)),
            step(),  # match(0): the lookup is sent
            step(),  # match(0): not known yet
            wait(4),  # the worker is busy; lookup_timeout_ms is 3,000
            step(),  # match(0): given up, 0; no free blocks
            step(),  # match(0) again
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="schedule: KeyError: 'r'",
        wrong={"lmcache": ">=0.3.10"},
        options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
        needs={"lmcache": ">=0.3.10"},
    ),
    "consumer-pins-left": Scenario(
        doc="A decode instance (kv_consumer) never takes back the pins of its lookups.",
        schedule=[stored_elsewhere(prompt(512)), admit("r", prompt(600), max_tokens=2), run(), settle()],
        rule="KVR009",
        text="pins of the worker",
        wrong={"lmcache": "<0.4.3"},
        options=Options(chunk_size=256, max_num_batched_tokens=1024, kv_role="kv_consumer"),
    ),
    "dead-worker-stalls-lookups": Scenario(
        doc="""A worker does not answer, and every step of the scheduler waits the whole timeout for the same request's
        lookup.

        There is no room for the request, so vLLM asks for it on every step; a lookup that timed out is not
        remembered.""",
        schedule=[lookups_fail(4), keep_blocks(0), admit("r", prompt(300)), step(4), free_blocks(), run(), settle()],
        rule="KVR012",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "full-hit-asked-twice": Scenario(
        doc="""The whole prompt is hit, and asked a second time the connector promises all of it: nothing is left to
        compute.

        200 tokens, all in LMCache. The first answer is 199, since the last token has to be computed for its logits;
        there are too few blocks; the second is 200, and vLLM asserts that there are new tokens (scheduler.py
        0.32.0:1170).""",
        schedule=[
            admit("before", prompt(200)),
            run(),
            reset_prefix_cache(),
            keep_blocks(0),
            admit("r", prompt(200), max_tokens=2),
            step(),  # match(0) by a lookup
            step(),  # match(0) from the lookup cache
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR001",
        wrong={"lmcache": "==0.3.10"},
        options=Options(block_size=8, num_blocks=40, chunk_size=40, max_num_batched_tokens=256),
    ),
    "lookup-skips-computed": Scenario(
        doc="""What vLLM has in its prefix cache counts as found in LMCache, and is promised when vLLM has it no more.

        The lookup leaves out the chunks that vLLM has computed and adds them to what is found
        (lmcache_lookup_client.py 0.3.11:190-243); the sum is kept for the next question about the request. LMCache
        has evicted the 256 tokens, vLLM has them, and has no room for the request yet; by the time that it has,
        others have taken those blocks too. The load comes short, and vLLM computes them again; with
        kv_load_failure_policy "fail" the request ends with an error. The tokens also count as stored, so they never
        are: rule KVR007.""",
        schedule=[
            admit("before", prompt(300)),
            run(),
            evict(9),
            keep_blocks(20),  # the prefix is among them
            admit("r", prompt(600)),
            step(),  # match(288): hit 256, of which LMCache has nothing; no free blocks
            keep_blocks(0),
            step(),  # match(0) from the lookup cache: 256 are promised
            free_blocks(),
            run(),
            settle(),
        ],
        rule="LAB002",
        wrong={"lmcache": ">=0.3.10.post2,<0.3.12"},
        options=Options(num_blocks=64, chunk_size=256, max_num_batched_tokens=512),
    ),
    "max-load-unaligned": Scenario(
        doc="""A capped load on top of a prefix hit that is no multiple of the chunk: promise and LoadSpec differ.

        max_tokens_per_load 1024, 80 tokens in vLLM: the promise is 1,024, the LoadSpec ends at 1,024, and
        `update_state_after_alloc` finds 1,024 promised where 1,024 - 80 is due. No preemption is needed.""",
        schedule=[
            admit("before", prompt(1500)),
            run(),
            reset_prefix_cache(),
            admit("short", prompt(80)),
            run(),
            admit("r", prompt(1500), max_tokens=2),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Mismatch in tokens to load: 1024 vs 1024 (tokens in lmcache) - 80 (tokens in vllm)",
        wrong={"lmcache": ">=0.4.7"},
        options=Options(
            num_blocks=120, chunk_size=256, max_num_batched_tokens=2048, lmcache={"max_tokens_per_load": 1024}
        ),
        needs={"lmcache": ">=0.4.7"},
    ),
    "mismatch-in-tokens-to-load": Scenario(
        doc="""The report of LMCache issue 2158: 256 are promised where vLLM has computed 336, and EngineCore dies.

        A prompt of 10,009 tokens, block 16, chunk 256. One step computes 336 of them, and LMCache stores one chunk.
        One more token is computed, so that the 21 blocks of the 336 are whole and stay in vLLM's prefix cache when
        another request takes the long one's blocks. While there are too few free blocks to take it back, vLLM asks
        the connector on every step: the first answer is made by a lookup and is 0, the next come from the lookup
        cache. Then the blocks come free.""",
        schedule=[
            # 637 of the 659 usable blocks, full after its third token; six tokens long
            admit("other", prompt(10190, seed=1), max_tokens=6),
            step(),
            admit(LONG, prompt(10009, seed=2), max_tokens=2),
            budget(1 + 336),
            step(),
            budget(1 + 1),
            step(),  # the 22nd block of the long one: none is free now
            budget(16384),
            step(),  # the other one needs a block: the long one is preempted
            step(),  # match(336) by a lookup; too few blocks
            step(),  # match(336) from the lookup cache; too few blocks; the other one finishes
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Mismatch in tokens to load: 256 vs 256 (tokens in lmcache) - 336 (tokens in vllm) - 0 (full lmcache hits "
        f"subtracts last token to recalculate logits) for request {LONG}",
        request=LONG,
        wrong={"lmcache": "==0.3.10"},
        options=Options(
            num_blocks=660, chunk_size=256, max_num_batched_tokens=16384, max_model_len=12288, reserve_full_isl=False
        ),
    ),
    "raw-hit-beyond-request": Scenario(
        doc="""A hit from the lookup cache is promised whole, and with what vLLM has computed it exceeds the request.

        1,101 tokens, 1,024 of them in LMCache, 800 in vLLM's prefix cache after a preemption. The first answer is
        224; there are too few blocks; the second is 1,024, and vLLM finds 1,824 computed tokens in a request of
        1,101: a bare AssertionError (vllm/v1/core/sched/scheduler.py 0.32.0:1048).""",
        schedule=[
            admit("r", prompt(1100), max_tokens=8),
            step(),
            preempt("r"),
            keep_blocks(50),  # of its 69 blocks, 50 stay in the prefix cache: 800 tokens
            step(),  # match(800) by a lookup
            step(),  # match(800) from the lookup cache
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR001",
        wrong={"lmcache": "==0.3.10"},
        options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048),
    ),
    "reused-id-gets-dead-hit": Scenario(
        doc="""A request id that is used again gets the hit of the aborted request before it: KV is promised that is
        not there.""",
        schedule=[
            admit("before", prompt(600)),
            run(),
            reset_prefix_cache(),
            keep_blocks(0),
            admit("r", prompt(600), max_tokens=2),
            step(),
            abort("r"),
            step(),
            free_blocks(),
            admit("r", prompt(700, seed=5), max_tokens=2),  # another prompt, of which nothing is cached
            run(),
            settle(),
        ],
        rule="LAB002",
        wrong={"lmcache": ">=0.3.9,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
}
