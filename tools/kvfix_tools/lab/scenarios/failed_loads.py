"""Scenarios of failed loads with LMCache's in-process connector."""

from dataclasses import replace
from functools import partial
from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import CONTENT, LAYERS, Options, Scenario, scenario
from kvfix_tools.lab.steps import Step, prompt

small_chunks = partial(scenario, options=Options(chunk_size=32, max_num_batched_tokens=256))
since_0_4_1 = partial(scenario, needs={"lmcache": ">=0.4.1"})  # in earlier releases the engine dies (KVF008)


def _poisoned(rank: int) -> list[Step]:
    """Let a load of 128 tokens fail in this rank. Then `r` hits tokens 128 to 256, which the failed step has stored."""
    failing = [do.fail_load("failing", rank=rank), do.store("failing", prompt(300))]
    return [do.store("first", prompt(128)), *failing, do.admit("r", prompt(300))]


def _layerwise(after_chunks: int, **more: Any) -> Scenario:
    """Return a scenario of a layerwise load that brings `after_chunks` of four chunks."""
    return scenario(
        [do.stored_elsewhere(prompt(256)), do.fail_load("r", after_chunks), do.admit("r", prompt(300), max_tokens=4)],
        needs={"lmcache": ">=0.3.15"},
        options=Options(lmcache={"use_layerwise": True}, max_num_batched_tokens=512),
        **more,
    )


SCENARIOS = {
    "failed-load-gone-under-way": scenario(
        [do.stored_elsewhere(prompt(96)), do.fail_load("before"), do.admit("before", prompt(100), max_tokens=4)],
        [do.step(), do.abort("before"), do.step(), do.admit("r", prompt(100), max_tokens=2)],
        doc="A client aborts a request before vLLM learns that the load failed: wrong KV stays in the prefix cache.",
        shows="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.4.1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.4.1"},
        options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
    ),
    "failed-load-keeps-output": since_0_4_1(
        # The load brings none of the 192 promised tokens, and vLLM rolls the request back to token 0.
        [do.store("first", prompt(192)), do.fail_load("r"), do.admit("r", prompt(193), max_tokens=8)],
        doc="A load fails while the next step is in flight: vLLM keeps the token of that step.",
        shows="LAB008 is not what the model says",
        not_in_hooks=CONTENT,
        wrong={"vllm": ">=0.15"},
        options=Options(max_num_batched_tokens=512, async_scheduling=True, kv_load_failure_policy="recompute"),
    ),
    "failed-load-keeps-output-of-stages": scenario(
        # The load brings 16 of 64 tokens. The steps that begin at tokens 128 and 192 are in flight too.
        [do.stored_elsewhere(prompt(64)), do.admit("r", prompt(230), max_tokens=2), do.fail_load("r", 1)],
        doc="A load fails while two more chunks of the prompt are in flight: vLLM keeps the token of the last chunk.",
        shows="LAB008",
        needs={"lmcache": ">=0.4.5", "vllm": ">=0.32"},
        options=Options(chunk_size=16, num_blocks=40, max_num_batched_tokens=64, ranks=3, pipeline=True),
    ),
    "failed-load-left-to-another": small_chunks(
        # Both requests arrive in the same step and share the blocks of the load.
        [do.stored_elsewhere(prompt(96)), do.admit("first", prompt(100)), do.admit("r", prompt(104), max_tokens=2)],
        [do.fail_load("first", after_chunks=1), do.step(), do.abort("first")],
        shows="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not report failed loads
    ),
    "failed-load-of-one-rank": scenario(
        _poisoned(rank=1),
        doc="A load fails in one of two ranks. The other rank stores KV that the step computes from wrong blocks.",
        shows="LAB001 the step reads token 128 of",
        # up to LMCache 0.3.15 another bug ends the schedule first; vLLM before 0.32 was not tested with several ranks
        needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
        options=Options(max_num_batched_tokens=512, ranks=2),
    ),
    "failed-load-poisons-cache": scenario(
        _poisoned(rank=0),
        doc="A load fails, and LMCache stores the KV that the step computes from the wrong blocks.",
        shows="LAB001 the step reads token 128 of",
        # LMCache 0.3.9 does not report failed loads; vLLM has kv_load_failure_policy since 0.13
        needs={"lmcache": ">=0.3.9.post1", "vllm": ">=0.13.0"},
        options=Options(max_num_batched_tokens=512, kv_load_failure_policy="fail"),
    ),
    "failed-load-preempted-under-way": scenario(
        # vLLM looks for failed loads only among running requests. vLLM preempts "r", because "other" needs a block.
        [do.stored_elsewhere(prompt(96)), do.fail_load("r"), do.admit("other", prompt(32, seed=1), max_tokens=4)],
        [do.admit("r", prompt(100), max_tokens=4), do.step(), do.keep_blocks(0), do.step(), do.free_blocks()],
        doc="vLLM preempts a request before it learns that the load failed, and keeps the output of the failed step.",
        shows="LAB008 is not what the model says",
        not_in_hooks=CONTENT,
        needs={"lmcache": ">=0.4.1"},
        options=Options(chunk_size=32, max_num_batched_tokens=256, async_scheduling=True),
    ),
    "failed-load-stays-cached": small_chunks(
        [do.stored_elsewhere(prompt(96)), do.admit("before", prompt(100), max_tokens=4), do.fail_load("before")],
        [do.step(), do.abort("before"), do.admit("r", prompt(100), max_tokens=2)],
        doc="The load of a request fails, and the request is aborted: its blocks stay in the prefix cache.",
        shows="LAB001",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.9.post1,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not report failed loads
    ),
    "failed-load-stored-last": since_0_4_1(
        # `failing` and `sharing` begin in the same step and share 128 loaded tokens. Both compute the rest of
        # their prompts from the KV of the failed load, and LMCache stores both prompts.
        [do.stored_elsewhere(prompt(128)), do.fail_load("failing"), do.admit("failing", prompt(300))],
        [do.store("sharing", prompt(260)), do.admit("r", prompt(300))],
        doc="A load fails with speculative decoding: vLLM collects the failed blocks before `wait_for_save` runs.",
        shows="LAB001 the step reads token 128 of",
        options=Options(max_num_batched_tokens=1024, save_last=True),
    ),
    "failed-load-stored-under-way": since_0_4_1(
        # The load brings none of the 128 promised tokens, but LMCache stores the KV that the second step computes.
        [do.stored_elsewhere(prompt(128)), do.fail_load("first"), do.store("first", prompt(320))],
        do.admit("r", prompt(324), max_tokens=4),
        doc="A load fails while the next step is in flight, and LMCache stores the KV of that step.",
        shows="LAB001",
        options=Options(max_num_batched_tokens=64, async_scheduling=True),
    ),
    "layerwise-load-finds-a-part": _layerwise(
        doc="A layerwise load finds only some of the chunks that were hit, and reports no failed block.",
        after_chunks=2,
        shows="LAB001 the step reads token 128 of",
    ),
    "layerwise-load-finds-nothing": _layerwise(
        doc="A layerwise load finds none of the chunks that were hit, and the worker dies.",
        after_chunks=0,
        shows="KVR011 mem_obj_consumer",
        not_in_hooks=LAYERS,
    ),
    "resumed-load-failure-unseen": small_chunks(
        [do.admit("r", prompt(100), max_tokens=4), do.step(), do.preempt("r")],
        [do.reset_prefix_cache(), do.fail_load("r")],
        shows="LAB001 its slot holds other KV",
        wrong={"vllm": ">=0.11.2,<0.20"},
        needs={"lmcache": ">=0.3.10"},  # in earlier releases a resumed request loads nothing
    ),
    "retrieve-fail-slot-mismatch": scenario(
        [do.stored_elsewhere(prompt(1536)), do.admit("r", prompt(1540), max_tokens=2)],
        do.fail_load("r", after_chunks=1),
        shows="KVR011 wait_for_save: AssertionError",
        wrong={"lmcache": ">=0.3.10,<=0.3.15"},  # before 0.3.10 the tracker is wrong too, but LMCache saves nothing
        needs={"lmcache": ">=0.3.9.post1"},  # 0.3.9 does not report failed loads
        options=Options(num_blocks=110, chunk_size=256, max_num_batched_tokens=2048),
    ),
}
_ONE_RANK = SCENARIOS["failed-load-of-one-rank"]
SCENARIOS["failed-load-of-one-rank-in-producer"] = replace(
    _ONE_RANK,
    doc="A load fails in one rank of a kv_producer, and the other rank stores KV computed from wrong blocks.",
    options=replace(_ONE_RANK.options, kv_role="kv_producer"),
)
