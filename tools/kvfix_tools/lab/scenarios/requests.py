"""Single requests of a certain kind, and new weights, with LMCache's in-process connector."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, admit, budget, new_weights, prompt, run, settle, step

ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": {"req_id": "r", "receiver_host": "decoder"}}}}
NEW_WEIGHTS = (
    admit("first", prompt(128), max_tokens=4),
    run(),
    new_weights(),
    admit("r", prompt(200), max_tokens=4),
    run(),
    settle(),
)

SCENARIOS = {
    "abort-engine-assert": Scenario(
        doc="The first client that goes away kills EngineCore: a bare assertion that the scheduler has a cache engine.",
        schedule=[admit("r", prompt(300), max_tokens=8), step(), abort("r"), settle()],
        rule="KVR011",
        text="finish_requests: AssertionError",
        wrong={"lmcache": ">=0.4.5,<0.5.1"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "abort-wants-first-token": Scenario(
        doc="""A request that is to return its first token is aborted before it has one, and EngineCore dies.

        LMCache's hook for an ended request takes the first generated token. A proxy asks for it of an instance for
        prefill.""",
        schedule=[
            admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"ret_first_tok": True}}}),
            step(),  # 128 of 300 tokens
            abort("r"),
            settle(),
        ],
        rule="KVR011",
        text="IndexError: list index out of range",
        # in the others an abort raises before (abort-engine-assert)
        wrong={"lmcache": ">=0.3.11,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
        options=Options(kv_role="kv_producer"),
    ),
    "cache-salt-not-in-key": Scenario(
        doc="""Two tenants share KV: LMCache in the engine does not look at the cache_salt that keeps them apart in
        vLLM.""",
        schedule=[
            admit("before", prompt(600), cache_salt="one"),
            run(),
            admit("r", prompt(600), max_tokens=2, cache_salt="two"),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
    ),
    "decode-tokens-left-out": Scenario(
        doc="""With asynchronous scheduling the tracker leaves out what is generated, and a later token comes to the
        wrong place.

        LMCache to 0.4.2 adds the tokens from the computed ones on; the one there is in flight and not known yet. It
        is known where the request has sat out a step, here for want of budget: then it is added behind those that
        the tracker has.""",
        schedule=[
            admit("other", prompt(20, seed=1), max_tokens=9),
            admit("r", prompt(43), max_tokens=9),
            step(2),
            budget(1),
            step(2),
            budget(128),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="not the first ones",
        wrong={"vllm": ">=0.11.2", "lmcache": ">=0.3.10,<0.4.3"},
        needs={"lmcache": ">=0.3.10"},
        options=Options(block_size=4, chunk_size=4, async_scheduling=True, lmcache={"save_decode_cache": True}),
    ),
    "decoder-named-in-part": Scenario(
        doc="""A request names a decoder and leaves out its ports, and EngineCore dies when it has blocks for the
        request.

        LMCache reads the keys of `disagg_spec` as if a proxy had made it; any client can send one (0.5.6
        vllm_v1_adapter.py:1560-1574).""",
        schedule=[admit("r", prompt(300), max_tokens=2, sampling=ASKS), run(), settle()],
        rule="KVR011",
        text="KeyError: 'receiver_init_port'",
        wrong={"lmcache": ">=0.3.9"},
    ),
    "lora-not-in-key": Scenario(
        doc="Two adapters share KV: the name of a LoRA is no part of the cache key.",
        schedule=[
            admit("before", prompt(600), lora="one"),
            run(),
            admit("r", prompt(600), max_tokens=2, lora="other"),
            run(),
            settle(),
        ],
        rule="LAB001",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(num_blocks=90, chunk_size=256, max_num_batched_tokens=1024),
    ),
    "producer-stores-what-it-must-not": Scenario(
        doc="""A kv_producer stores the prompt of a request that asks for `lmcache.skip_save`.

        Each request that was looked up has metadata for the worker, and a kv_producer stores whatever has.""",
        schedule=[
            admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
            run(),
            settle(),
        ],
        rule="LAB010",
        text="and it asks for lmcache.skip_save",
        wrong={"lmcache": ">=0.3.12"},  # before, another bug ends it
        options=Options(kv_role="kv_producer"),
    ),
    "prompt-embeds": Scenario(
        doc="A prompt given as embeddings has no token ids, and EngineCore dies counting them.",
        schedule=[admit("r", None, max_tokens=2, embeddings=(300, 0.0)), run(), settle()],
        rule="KVR011",
        text="schedule: ",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(chunk_size=256, max_num_batched_tokens=1024),
    ),
    "reset-keeps-external-cache": Scenario(
        doc="""New weights, and vLLM answers that the connector's cache was reset: LMCache keeps all, and old KV is hit.

        Its in-process connector has no `reset_cache`; vLLM takes the None of its base class for success
        (scheduler.py 0.32.0:2898). With the fix the answer is False: the caller knows that the cache has old KV.""",
        schedule=NEW_WEIGHTS,
        rule="LAB001",
        text="the step reads token 0 of",
        wrong={"vllm": ">=0.15.1"},
        needs={"vllm": ">=0.15.1"},
        options=Options(max_num_batched_tokens=512),
    ),
}
