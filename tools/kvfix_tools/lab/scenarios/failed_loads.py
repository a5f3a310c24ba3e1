"""Loads that fail, with LMCache's in-process connector."""

from dataclasses import replace

from kvfix_tools.lab.scenario import CONTENT, LAYERS, Options, Scenario
from kvfix_tools.lab.steps import (
    abort,
    admit,
    expect_all_ended,
    fail_load,
    free_blocks,
    keep_blocks,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIOS = {
    "failed-load-gone-under-way": Scenario(
        doc="""A load fails, and before vLLM hears of it the request is aborted: its blocks stay in the prefix cache as
        they are.

        vLLM looks at the requests that run. Between a step and its answer one may be aborted, and with asynchronous
        scheduling be preempted; its blocks can be found by then, and hold nothing.""",
        schedule=[
            stored_elsewhere(prompt(96)),
            fail_load("before"),
            admit("before", prompt(100), max_tokens=4),
            step(),
            abort("before"),
            step(),
            admit("r", prompt(100), max_tokens=2),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.4.1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.4.1"},
        options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
    ),
    "failed-load-keeps-output": Scenario(
        doc="""A load fails while the next step is in flight, and the token that this step says is taken for the
        request's.

        With asynchronous scheduling, vLLM's default on a GPU, a step is scheduled before the answer of the last one
        is there. 160 tokens are promised of 161, the load brings none. vLLM takes the request back to token 0 and
        drops what the failed step has said (scheduler.py 0.32.0:2088); the next one has computed on top of it, and
        its token is kept.""",
        schedule=[
            admit("first", prompt(192)),
            run(),
            reset_prefix_cache(),
            fail_load("r"),
            admit("r", prompt(193), max_tokens=8),
            run(),
            settle(),
        ],
        rule="LAB008",
        not_in_hooks=CONTENT,
        text="is not what the model says",
        wrong={"vllm": ">=0.15"},
        needs={"lmcache": ">=0.4.1"},  # before, LMCache dies of such a request (KVF008)
        options=Options(max_num_batched_tokens=512, async_scheduling=True, kv_load_failure_policy="recompute"),
    ),
    "failed-load-keeps-output-of-stages": Scenario(
        doc="""A load fails while two more chunks of the prompt are in flight: what the last one says is taken for the
        first token.

        Three stages. The load of tokens 0 to 64 brings 16, and the chunks up to token 192 and up to the end are
        with the workers when vLLM gets to know it.""",
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
        options=Options(chunk_size=16, num_blocks=40, max_num_batched_tokens=64, ranks=3, pipeline=True),
    ),
    "failed-load-left-to-another": Scenario(
        doc="""Two requests with one prompt come in one step; the load of the first fails, it is aborted; the second
        counts on it.

        A load within the step is in vLLM's prefix cache before it is done, so the second shares its blocks. After
        the failure only the first goes back to compute them (vLLM 0.32 scheduler.py:3295).""",
        schedule=[
            stored_elsewhere(prompt(96)),
            admit("first", prompt(100)),
            admit("r", prompt(104), max_tokens=2),
            fail_load("first", after_chunks=1),
            step(),
            abort("first"),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
        options=Options(chunk_size=32, max_num_batched_tokens=256),
    ),
    "failed-load-of-one-rank": Scenario(
        doc="""A load fails in one rank, and the other one stores what the step computes on top of it under valid keys.

        Two ranks. 128 tokens are hit and promised, the second rank's load brings none of them. Each rank's
        attention needs all tokens, and every later layer needs that of all ranks: what the step computes of tokens
        128 to 300 is wrong in both. The second rank knows that its load failed (and does not store with KVF007);
        the first one does not know, and stores 128 to 256 in the same step (vllm_v1_adapter.py 0.5.6:1104-1259).
        vLLM ends the request, or computes it again, and the first rank's cache keeps its chunks. The next request
        with this prompt is answered from them.""",
        schedule=[
            admit("first", prompt(128)),
            run(),
            reset_prefix_cache(),
            fail_load("failing", rank=1),
            admit("failing", prompt(300)),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(300)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 128 of",
        wrong={"lmcache": ">=0.4.1"},
        # up to 0.3.15 another bug ends it first; several ranks were not tried with earlier releases of vLLM
        needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
        options=Options(max_num_batched_tokens=512, ranks=2),
    ),
    "failed-load-poisons-cache": Scenario(
        doc="""A load fails, and what the step computes on top of it is stored under valid keys: others get wrong
        answers from it.

        128 tokens are hit and promised, the load brings none of them. vLLM learns of the failed blocks and drops
        the output of the request, but the step has run: it computed tokens 128 to 300 from KV that is not there,
        and in the same step `wait_for_save` stores 128 to 256 of them (vllm_v1_adapter.py 0.5.6:1104-1259 does not
        look at the failed blocks that `start_load_kv` has just recorded). The next request with this prompt is
        answered from them. No line is logged for it. With kv_load_failure_policy "recompute" the right KV is
        computed and stored again a step later; the cache keeps the chunks that it has.""",
        schedule=[
            admit("first", prompt(128)),
            run(),
            reset_prefix_cache(),
            fail_load("failing"),
            admit("failing", prompt(300)),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(300)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 128 of",
        wrong={"lmcache": ">=0.3.9.post1"},
        # 0.3.9 does not tell vLLM that a load failed; before 0.13 vLLM has no such option, and computes it again
        needs={"lmcache": ">=0.3.9.post1", "vllm": ">=0.13.0"},
        options=Options(max_num_batched_tokens=512, kv_load_failure_policy="fail"),
    ),
    "failed-load-preempted-under-way": Scenario(
        doc="""A load fails, and before vLLM hears of it the request is preempted: what the failed step has said is
        kept.

        vLLM looks at the requests that run. With asynchronous scheduling the next step is scheduled before the
        answer of the last one is there; here another request needs a block for its first token, and there is none.""",
        schedule=[
            stored_elsewhere(prompt(96)),
            fail_load("r"),
            admit("other", prompt(32, seed=1), max_tokens=4),
            admit("r", prompt(100), max_tokens=4),
            step(),
            keep_blocks(0),
            step(),
            free_blocks(),
            run(),
            settle(),
        ],
        rule="LAB008",
        not_in_hooks=CONTENT,
        text="is not what the model says",
        wrong={"vllm": ">=0.11.2"},
        needs={"lmcache": ">=0.4.1"},
        options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
    ),
    "failed-load-stays-cached": Scenario(
        doc="""Blocks whose load failed stay in vLLM's prefix cache, and the next request reads them: wrong text, no
        error.

        With kv_load_failure_policy=recompute vLLM leaves them there, since the request is to compute them again at
        once (scheduler.py 0.32.0:3412). If it is aborted or preempted before that, they stay.""",
        schedule=[
            stored_elsewhere(prompt(96)),
            admit("before", prompt(100), max_tokens=4),
            fail_load("before"),
            step(),
            abort("before"),
            admit("r", prompt(100), max_tokens=2),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
        options=Options(chunk_size=32, max_num_batched_tokens=256),
    ),
    "failed-load-stored-last": Scenario(
        doc="""A load fails with speculative decoding on: vLLM has taken the failed blocks by the time the step is
        saved.

        With a drafter vLLM defers `wait_for_save` until the drafts are made, and asks for the failed blocks before
        that (gpu_model_runner.py 0.32.0:4179, 4509). `failing` and `sharing` begin in the same step with the same
        128 tokens, whose load brings none; both compute the rest of their prompts on top of them, and both are
        saved.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            fail_load("failing"),
            admit("failing", prompt(300)),
            admit("sharing", prompt(260)),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(300)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 128 of",
        wrong={"lmcache": ">=0.3.9.post1"},
        needs={"lmcache": ">=0.4.1"},  # before, LMCache dies of such a request (KVF008)
        options=Options(max_num_batched_tokens=1024, save_last=True),
    ),
    "failed-load-stored-under-way": Scenario(
        doc="""A load fails while the next step is in flight, and what that step computes on top of it is stored for
        others.

        With asynchronous scheduling a step is scheduled before the answer of the last one is there. 128 tokens are
        promised of 320, 64 are computed in a step: the load brings none, and the second step stores what it has
        computed after the first.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            fail_load("first"),
            admit("first", prompt(320)),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(324), max_tokens=4),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"vllm": ">=0.11.2"},
        # before 0.4.1 LMCache dies of such a request (KVF008)
        needs={"lmcache": ">=0.4.1"},
        options=Options(max_num_batched_tokens=64, async_scheduling=True),
    ),
    "layerwise-load-finds-a-part": Scenario(
        doc="""By layers: a part of the chunks that were hit is left, the others are not reported, and the step reads
        other KV.

        `wait_for_layer_load` logs how many tokens were loaded (vllm_v1_adapter.py 0.5.6:990-992), and that is all.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            fail_load("r", after_chunks=2),
            admit("r", prompt(300), max_tokens=4),
            run(),
            expect_all_ended(),
        ],
        rule="LAB001",
        text="the step reads token 128 of",
        wrong={"lmcache": ">=0.3.15"},
        needs={"lmcache": ">=0.3.15"},
        options=Options(lmcache={"use_layerwise": True}, max_num_batched_tokens=512),
    ),
    "layerwise-load-finds-nothing": Scenario(
        doc="""By layers: none of the chunks that were hit is left when they are to be loaded, and EngineCore dies.

        `retrieve_layer` (cache_engine.py 0.5.6:1133) goes on with a variable that is set only where a chunk was
        found.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            fail_load("r"),
            admit("r", prompt(300), max_tokens=4),
            run(),
            expect_all_ended(),
        ],
        rule="KVR011",
        text="mem_obj_consumer",
        not_in_hooks=LAYERS,
        wrong={"lmcache": ">=0.3.15"},
        needs={"lmcache": ">=0.3.15"},
        options=Options(lmcache={"use_layerwise": True}, max_num_batched_tokens=512),
    ),
    "resumed-load-failure-unseen": Scenario(
        doc="""A request is preempted, comes back with a load, and that fails: vLLM does not see it and computes on top
        of nothing.

        vLLM looks for failed blocks among what was cached when the request was first scheduled (scheduler.py
        0.15.1:2007).""",
        schedule=[
            admit("r", prompt(100), max_tokens=4),
            step(),
            preempt("r"),
            reset_prefix_cache(),
            fail_load("r"),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="its slot holds other KV",
        wrong={"vllm": ">=0.11.2,<0.20"},
        needs={"lmcache": ">=0.3.10"},  # before, a resumed request loads nothing
        options=Options(chunk_size=32, max_num_batched_tokens=256),
    ),
    "retrieve-fail-slot-mismatch": Scenario(
        doc="""After a failed load the tracker holds tokens for which the request has no slots: the worker dies when
        it saves.""",
        schedule=[
            stored_elsewhere(prompt(1536)),
            admit("r", prompt(1540), max_tokens=2),
            fail_load("r", after_chunks=1),
            run(20),
            settle(),
        ],
        rule="KVR011",
        text="wait_for_save: AssertionError",
        wrong={"lmcache": ">=0.3.10,<=0.3.15"},  # before, the tracker is as wrong, but nothing is saved then
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not tell vLLM that a load failed
        options=Options(num_blocks=110, chunk_size=256, max_num_batched_tokens=2048),
    ),
}
_OF_ONE_RANK = SCENARIOS["failed-load-of-one-rank"]
SCENARIOS["failed-load-of-one-rank-in-producer"] = replace(
    _OF_ONE_RANK,
    doc="""A load fails in one rank of a kv_producer, and the other one stores what the step computes on top of it.

    The schedule of failed-load-of-one-rank. A request that names no decoder is stored for all, as with kv_both, but a
    kv_producer stores it even if its metadata say that it is not to be saved (vllm_v1_adapter.py 0.5.6:1152).""",
    options=replace(_OF_ONE_RANK.options, kv_role="kv_producer"),
)
