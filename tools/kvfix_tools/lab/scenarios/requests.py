"""Scenarios of preempted requests, special options, sessions, weight updates, and requests that block each other."""

from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.fuzz.parameters import DECODER
from kvfix_tools.lab.scenario import LARGE, Options, Scenario, large_chunks, scenario
from kvfix_tools.lab.scenarios.mp import MP, NEW_WEIGHTS, states
from kvfix_tools.lab.scenarios.pairs import OFFLOAD
from kvfix_tools.lab.steps import continued, prompt

PART_OF_DECODER = {"extra_args": {"kv_transfer_params": {"disagg_spec": {"req_id": "r", "receiver_host": "decoder"}}}}
ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": DECODER}}}
producer = partial(scenario, options=Options(kv_role="kv_producer"))
only_0_32 = partial(scenario, wrong={"vllm": ">=0.32,<0.33"}, needs={"vllm": ">=0.32"})

#: Steps that preempt request r. vLLM then caches fewer tokens of the request than LMCache.
FEWER_IN_VLLM = (
    [do.admit("r", prompt(300), max_tokens=8), do.step(), do.preempt("r")],
    do.keep_blocks(10),  # 160 tokens stay in the prefix cache, fewer than the 256 that LMCache has
    do.free_blocks(),
)


def _not_in_key(doc: str, name: str) -> Scenario:
    return scenario(
        [do.serve("before", prompt(600), **{name: "one"}), do.admit("r", prompt(600), max_tokens=2, **{name: "other"})],
        doc=doc,
        shows="LAB001",
        options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
    )


SCENARIOS = {
    "abort-engine-assert": large_chunks(
        [do.admit("r", prompt(300), max_tokens=8), do.step(), do.abort("r")],
        shows="KVR011 finish_requests: AssertionError",
        wrong={"lmcache": ">=0.4.5,<0.5.1"},
    ),
    "abort-wants-first-token": producer(
        do.admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"ret_first_tok": True}}}),
        do.step(),  # computes 128 of 300 tokens
        do.abort("r"),
        shows="KVR011 IndexError: list index out of range",
        # in the excluded releases the abort itself raises (abort-engine-assert)
        wrong={"lmcache": ">=0.3.11,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    ),
    "cache-salt-not-in-key": _not_in_key("Two tenants share KV: LMCache's key lacks the cache_salt.", "cache_salt"),
    "decode-tokens-left-out": scenario(
        [do.admit("other", prompt(20, seed=1), max_tokens=9), do.admit("r", prompt(43), max_tokens=9), do.step(2)],
        [do.budget(1), do.step(2), do.budget(128)],
        shows="LAB001 begins with other tokens",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.10,<0.4.3"},
        needs={"lmcache": ">=0.3.10"},
        options=Options(block_size=4, chunk_size=4, async_scheduling=True, lmcache={"save_decode_cache": True}),
    ),
    "decoder-named-in-part": scenario(
        do.admit("r", prompt(300), max_tokens=2, sampling=PART_OF_DECODER),
        shows="KVR011 KeyError: 'receiver_init_port'",
    ),
    "lora-not-in-key": _not_in_key("Two LoRA adapters share KV: LMCache's key lacks the adapter's name.", "lora"),
    "producer-stores-what-it-must-not": producer(
        do.admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
        shows="LAB010 and it asks for lmcache.skip_save",
        wrong={"lmcache": ">=0.3.12"},  # in earlier releases the scenario ends early because of another bug
    ),
    "prompt-embeds": scenario(
        do.admit("r", None, max_tokens=2, embeddings=(300, 0.0)),
        shows="KVR011 schedule: ",
        options=Options(chunk_size=256, max_num_batched_tokens=1024),
    ),
    "reset-keeps-external-cache": scenario(
        NEW_WEIGHTS,
        doc="A weight update does not reset LMCache, but vLLM returns True. Requests then hit old KV.",
        shows="LAB001 the step reads token 0 of",
        needs={"vllm": ">=0.15.1"},
        options=Options(max_num_batched_tokens=512),
    ),
    # ------------------------------------------------------------------ preempted and resumed
    "decoder-left-after-resume": producer(
        [do.admit("r", prompt(300), max_tokens=2, sampling=ASKS), do.step(), do.preempt("r")],
        doc="A preempted request with a disagg_spec is resumed, and LMCache never removes its entry for the decoder.",
        shows="KVR009 tmp_disagg_tracker still holds it",
    ),
    "preempt-full-hit": large_chunks(
        # Another request has stored the prompt and the output, 256 tokens. vLLM takes 255 tokens, and recomputes one.
        [do.stored_elsewhere(continued(prompt(250), 6)), do.admit("r", prompt(250), max_tokens=16), do.step(6)],
        do.preempt("r"),
        doc="LMCache has all tokens of a preempted request, but vLLM takes one token less: LMCache's assertion fails.",
        shows="KVR011 Preempted request r has num_computed_tokens 255 but",
        wrong={"lmcache": ">=0.3.10.post1,<0.4.3"},
    ),
    "preempt-local-exceeds-lmcache": scenario(
        [do.admit("r", prompt(1000), max_tokens=8), do.step(), do.preempt("r")],
        doc="vLLM has more tokens of a preempted request than LMCache, and EngineCore dies at the resume.",
        shows="KVR011 Preempted request r has num_computed_tokens 992 but lmcache_cached_tokens 768",
        wrong={"lmcache": ">=0.3.10.post1,<=0.3.10.post2"},
        options=LARGE(num_blocks=80),
    ),
    "preempt-min-retrieve": scenario(
        # LMCache has 1,024 tokens and vLLM 800. LMCache promises nothing, as 224 < min_retrieve_tokens (512).
        [do.admit("r", prompt(1100), max_tokens=8), do.step(), do.preempt("r")],
        do.keep_blocks(50),  # 800 tokens stay in the prefix cache, 1,024 are in LMCache
        [do.step(), do.free_blocks()],
        doc="LMCache skips a hit below min_retrieve_tokens but expects the tokens: EngineCore dies at the resume.",
        shows="KVR011 Preempted request r has num_computed_tokens 800 but",
        options=LARGE(lmcache={"min_retrieve_tokens": 512}),
        needs={"lmcache": ">=0.3.14"},
    ),
    "preempt-multiconnector-loser": scenario(
        [do.admit("r", prompt(1100), max_tokens=8), do.step(), do.preempt("r")],
        # 800 tokens stay in the prefix cache. LMCache has 1,024 tokens, and the other connector has 1,088.
        [do.keep_blocks(50), do.has_in_other_connector("r"), do.free_blocks()],
        doc="Another connector of a MultiConnector loads a preempted request, and EngineCore dies at the resume.",
        shows="KVR011 Preempted request r has num_computed_tokens 1088 but",
        wrong={"lmcache": ">=0.3.10.post1"},
        options=LARGE(beside=True),
    ),
    "preempt-prompt-logprobs": scenario(
        # vLLM reads no prefix cache for this request (scheduler.py 0.32.0:983).
        [do.admit("r", prompt(1100), max_tokens=8, sampling={"prompt_logprobs": 1}), do.step(), do.preempt("r")],
        doc="With prompt_logprobs vLLM loads no promised token, and EngineCore dies when the request resumes.",
        shows="KVR011 Preempted request r has num_computed_tokens 0 but",
        # before vLLM 0.31 this request skips only the prefix cache, and takes the hit of the connector
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.3.10.post1"},
        options=LARGE(),
    ),
    "priority-left-after-resume": large_chunks(
        FEWER_IN_VLLM,
        doc="A preempted request is looked up again, and LMCache keeps its new priority for ever.",
        shows="KVR009 _requests_priority",
    ),
    "resume-is-not-known": large_chunks(FEWER_IN_VLLM, shows="KVR006", wrong={"lmcache": ">=0.3.9,<0.3.10"}),
    "resume-shares-block-list": scenario(
        # In the fourth step, LMCache's tracker looks for tokens 384 to 512 in the blocks of tokens 256 to 384.
        [do.admit("preempted", prompt(520)), do.step(), do.preempt("preempted")],
        [do.run(), do.reset_prefix_cache(), do.admit("r", prompt(520))],
        doc="For the last tokens of a resumed request, LMCache reads wrong blocks, and stores KV of other tokens.",
        shows="LAB001 the step reads token 384 of",
        # in earlier releases the stored chunks also lack tokens, and are never hit (KVF002)
        wrong={"lmcache": ">=0.3.11"},
    ),
    "resume-then-sits-out": scenario(
        # The KV of tokens 384 to 512 overwrites the KV of tokens 256 to 384.
        [do.admit("other", prompt(1, seed=1), max_tokens=20), do.budget(129), do.admit("r", prompt(520))],
        [do.step(), do.preempt("r"), do.step(2), do.budget(1)],  # "other" uses the whole budget
        [do.step(), do.budget(129)],
        doc="vLLM leaves a resumed request out of one step. Then the request overwrites blocks that hold its KV.",
        shows="LAB001 the step reads token 256 of 512",
        wrong={"lmcache": ">=0.3.10"},
        options=Options(max_num_batched_tokens=129),
    ),
    "resumed-as-new-loses-tokens": scenario(
        # LMCache has 64 prompt tokens and 32 generated tokens. At the resume, LMCache promises 96 tokens and loads 64.
        [do.stored_elsewhere(continued(prompt(64), 32)), do.admit("r", prompt(64), max_tokens=40), do.step(33)],
        [do.preempt("r"), do.reset_prefix_cache()],
        shows="KVR004 tokens 0 to 64 are to be loaded",
        wrong={"vllm": ">=0.32", "lmcache": ">=0.3.10"},
        needs={"vllm": ">=0.32"},  # in earlier releases model runner V2 was experimental
        options=Options(chunk_size=32, model_runner_v2=True),
    ),
    # ------------------------------------------------------------------ sessions, and requests that block each other
    "failed-load-reserves-itself": scenario(
        [do.admit("r", prompt(140), max_tokens=8), do.step(6), do.preempt("r")],
        do.keep_blocks(0),  # when the request resumes, no block of the request is in vLLM's prefix cache
        [do.step(), do.free_blocks(), do.fail_load("r")],
        shows="LAB003",
        wrong={"vllm": ">=0.26.0", "lmcache": ">=0.5.6"},
        options=MP(num_blocks=16, max_num_batched_tokens=256),
    ),
    "loaded-requests-lock-out": scenario(
        # "low" is loaded, has 8 of 20 blocks, and needs one more. "low" waits while "running" uses the whole budget.
        # "r" has a higher priority, has loaded 8 of 16 blocks, and needs 8 more. 4 blocks are free. `schedule` stops
        # at "r" (scheduler.py 0.32.0:1275-1282), so "low" waits for ever. With `scheduler_reserve_full_isl` vLLM would
        # admit "r" only when all 16 blocks are free.
        [do.stored_elsewhere(prompt(128)), do.stored_elsewhere(prompt(128, seed=1))],
        [do.admit("running", prompt(16, seed=2), max_tokens=16), do.step()],
        [do.admit("low", prompt(140), max_tokens=2, priority=1), do.step()],
        [do.admit("r", prompt(256, seed=1), max_tokens=2, priority=0), do.step(7)],  # "low" and "r" load
        do.budget(1),  # "running" uses the whole budget
        [do.step(5), do.budget(256)],
        shows="LAB009 1 request is loaded and waits behind r, which needs 8 blocks; 4 are free",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        options=MP(delay=5, num_blocks=21, max_num_batched_tokens=256, reserve_full_isl=False, policy="priority"),
    ),
    "loads-preempted-in-turn": scenario(
        # Each prompt fills its blocks, so the first generated token needs one more block. The loads hold all blocks, so
        # vLLM preempts the loaded request and drops the token. While this request loads again, the other load ends.
        [do.ask("a", prompt(64)), do.ask("b", prompt(64, seed=1))],
        do.run(),  # the OffloadingConnector has both prompts
        [do.ask("r", prompt(64), prefill_tokens=2), do.step(3), do.ask("other", prompt(64, seed=1), prefill_tokens=2)],
        shows="LAB003",
        options=OFFLOAD(offloading="first", delay=5, num_blocks=9, decode_blocks=60, async_scheduling=True),
    ),
    "lookahead-stops-prefill": states(
        # A step computes tokens 32 to 46 of 50. No block ends at token 46. The next step computes no token.
        [do.admit("r", prompt(50)), do.budget(16), do.step(4), do.budget(64)],
        shows="LAB003 is RUNNING for ever",
        options=MP(chunk_size=16, max_num_batched_tokens=64, states=True, drafter="mtp", drafts=4, acceptance=50),
    ),
    "preempted-session-lost": only_0_32(
        [do.admit("r", prompt(30), resumable=True), do.step(), do.preempt("r")],
        [do.add_input("r", prompt(16, seed=1)), do.run(), do.end_input("r")],
        shows="LAB003 for ever",
        options=Options(async_scheduling=True),
    ),
    "session-and-load-lock-out": scenario(
        # "session" takes blocks that were reserved for the load of "r", and keeps the blocks at the end of the turn.
        [do.stored_elsewhere(prompt(264)), do.admit("session", prompt(40, seed=1), max_tokens=12, resumable=True)],
        [do.step(), do.admit("r", prompt(264), max_tokens=2), do.step(30)],
        [do.add_input("session", prompt(48, seed=2)), do.step(30), do.end_input("session")],
        shows="LAB009",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        options=MP(delay=20, num_blocks=21, max_num_batched_tokens=256),
    ),
    "session-state-has-drafts": states(
        # The last step computes four tokens, and the turn ends after two of the tokens.
        [do.admit("r", prompt(20), max_tokens=7, resumable=True), do.add_input("r", prompt(21), max_tokens=5)],
        [do.run(), do.end_input("r")],
        doc="A turn ends within accepted drafts: vLLM drops the later tokens, but the Mamba state includes them.",
        shows="LAB001 the step reads token",
        options=MP(states=True, drafter="mtp", drafts=3, acceptance=100),
    ),
    "session-state-runs-ahead": states(
        # Three steps are in flight: the sixth token is computed before vLLM knows that the fifth token ends the turn.
        [do.admit("r", prompt(1), max_tokens=5, resumable=True), do.add_input("r", prompt(21), max_tokens=5)],
        [do.run(), do.end_input("r")],
        doc="A session's turn ends while its next token is computed: vLLM drops the token, but the state includes it.",
        shows="LAB001 the step reads token 4 of 5 computed ones, its slot holds other KV in KV group 1",
        options=MP(ranks=3, pipeline=True, async_scheduling=True, states=True),
    ),
    "trimmed-drafts-stay-computed": only_0_32(
        # A step samples four tokens, but the session may generate only one.
        [do.admit("r", prompt(20), max_tokens=2, resumable=True), do.step(2)],
        [do.add_input("r", prompt(60, seed=1), max_tokens=4), do.run(), do.end_input("r")],
        shows="LAB001 the step reads token 22 of 24 computed ones",
        options=Options(max_num_batched_tokens=128, drafter="eagle", drafts=3, acceptance=100),
    ),
}
