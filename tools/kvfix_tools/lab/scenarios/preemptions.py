"""Requests that are preempted and resumed, with LMCache's in-process connector."""

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import Options, scenario
from kvfix_tools.lab.steps import continued, prompt

DECODER = {"req_id": "r", "receiver_host": "decoder", "receiver_init_port": [1], "receiver_alloc_port": [2]}
ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": DECODER}}}

#: vLLM has fewer tokens of a preempted request than LMCache.
FEWER_IN_VLLM = (
    do.admit("r", prompt(300), max_tokens=8),
    do.step(),
    do.preempt("r"),
    do.keep_blocks(10),  # 160 tokens stay in the prefix cache, fewer than the 256 that LMCache has
    do.free_blocks(),
)

SCENARIOS = {
    "decoder-left-after-resume": scenario(
        [do.admit("r", prompt(300), max_tokens=2, sampling=ASKS), do.step(), do.preempt("r")],
        doc="A preempted request with a disagg_spec is resumed, and LMCache keeps its decoder for ever.",
        shows="KVR009 tmp_disagg_tracker still holds it",
        options=Options(kv_role="kv_producer"),
    ),
    "preempt-full-hit": scenario(
        # Another request has stored the same prompt and generated tokens. The last token must be computed again, so
        # vLLM has 255 of 256 tokens.
        [do.stored_elsewhere(continued(prompt(250), 6)), do.admit("r", prompt(250), max_tokens=16), do.step(6)],
        do.preempt("r"),
        doc="LMCache has all tokens of a preempted request, and vLLM takes one less than LMCache asserts.",
        shows="KVR011 Preempted request r has num_computed_tokens 255 but",
        wrong={"lmcache": ">=0.3.10.post1,<0.4.3"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "preempt-local-exceeds-lmcache": scenario(
        [do.admit("r", prompt(1000), max_tokens=8), do.step(), do.preempt("r")],
        doc="vLLM has more tokens of a preempted request than LMCache, and EngineCore dies when it resumes.",
        shows="KVR011 Preempted request r has num_computed_tokens 992 but lmcache_cached_tokens 768",
        wrong={"lmcache": ">=0.3.10.post1,<=0.3.10.post2"},
        options=Options(num_blocks=80, chunk_size=256, max_num_batched_tokens=2048),
    ),
    "preempt-min-retrieve": scenario(
        # min_retrieve_tokens is 512. LMCache has 1,024 tokens and vLLM 800, so LMCache promises nothing.
        [do.admit("r", prompt(1100), max_tokens=8), do.step(), do.preempt("r")],
        do.keep_blocks(50),  # 800 tokens stay in the prefix cache, 1,024 are in LMCache
        [do.step(), do.free_blocks()],
        doc="A hit is too small for a load, but LMCache expects it: EngineCore dies when the request resumes.",
        shows="KVR011 Preempted request r has num_computed_tokens 800 but",
        options=Options(
            num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, lmcache={"min_retrieve_tokens": 512}
        ),
        needs={"lmcache": ">=0.3.14"},
    ),
    "preempt-multiconnector-loser": scenario(
        [do.admit("r", prompt(1100), max_tokens=8), do.step(), do.preempt("r")],
        # 800 tokens stay in the prefix cache, LMCache has 1,024 tokens, the other connector 1,088
        [do.keep_blocks(50), do.has_in_other_connector("r"), do.free_blocks()],
        doc="Another connector of a MultiConnector loads a preempted request, and EngineCore dies when it resumes.",
        shows="KVR011 Preempted request r has num_computed_tokens 1088 but",
        wrong={"lmcache": ">=0.3.10.post1"},
        options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, beside=True),
    ),
    "preempt-prompt-logprobs": scenario(
        # vLLM reads no prefix cache for this request (scheduler.py 0.32.0:982).
        [do.admit("r", prompt(1100), max_tokens=8, sampling={"prompt_logprobs": 1}), do.step(), do.preempt("r")],
        doc="With prompt_logprobs vLLM takes nothing of a promise, and EngineCore dies when the request resumes.",
        shows="KVR011 Preempted request r has num_computed_tokens 0 but",
        # before vLLM 0.31 this request skips only the prefix cache, and takes the promise of the connector
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.3.10.post1"},
        options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048),
    ),
    "priority-left-after-resume": scenario(
        FEWER_IN_VLLM,
        doc="A preempted request is looked up again, and LMCache keeps its new priority for ever.",
        shows="KVR009 _requests_priority",
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "resume-is-not-known": scenario(
        # LMCache promises its tokens and starts no load, so the request continues with missing KV.
        FEWER_IN_VLLM,
        shows="KVR006",
        wrong={"lmcache": ">=0.3.9,<0.3.10"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "resume-shares-block-list": scenario(
        # In the fourth step the tracker looks for tokens 384 to 512 in the blocks of tokens 256 to 384.
        [do.admit("preempted", prompt(520)), do.step(), do.preempt("preempted")],
        [do.run(), do.reset_prefix_cache(), do.admit("r", prompt(520))],
        doc="LMCache takes blocks of other tokens for the last tokens of a resumed request, and stores their KV.",
        shows="LAB001 the step reads token 384 of",
        # in earlier releases the stored chunks also lack tokens, and are never hit (KVF002)
        wrong={"lmcache": ">=0.3.11"},
        options=Options(max_num_batched_tokens=128),
    ),
    "resume-then-sits-out": scenario(
        # Tokens 384 to 512 overwrite tokens 256 to 384.
        [do.admit("other", prompt(1, seed=1), max_tokens=20), do.budget(129), do.admit("r", prompt(520))],
        [do.step(), do.preempt("r"), do.step(2)],
        do.budget(1),  # "other" uses it
        [do.step(), do.budget(129)],
        doc="A resumed request is left out of a step, and then computes in blocks that it already uses.",
        shows="LAB001 the step reads token 256 of 512",
        wrong={"lmcache": ">=0.3.10"},
        options=Options(max_num_batched_tokens=129),
    ),
    "resumed-as-new-loses-tokens": scenario(
        # The cache has 96 tokens, 64 of them the prompt. After 33 generated tokens, LMCache promises 96 and loads 64.
        [do.stored_elsewhere(continued(prompt(64), 32)), do.admit("r", prompt(64), max_tokens=40), do.step(33)],
        [do.preempt("r"), do.reset_prefix_cache()],
        shows="KVR004 tokens 0 to 64 are to be loaded",
        wrong={"vllm": ">=0.32", "lmcache": ">=0.3.10"},
        needs={"vllm": ">=0.32"},  # in earlier releases model runner V2 was experimental
        options=Options(chunk_size=32, model_runner_v2=True),
    ),
}
