"""Requests that are preempted and resumed, with LMCache's in-process connector."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    budget,
    continued,
    free_blocks,
    has_in_other_connector,
    keep_blocks,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    step,
    stored_elsewhere,
)

DECODER = {"req_id": "r", "receiver_host": "decoder", "receiver_init_port": [1], "receiver_alloc_port": [2]}
ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": DECODER}}}

SCENARIOS = {
    "decoder-left-after-resume": Scenario(
        doc="""A preempted request with a disagg_spec is resumed, and the decoder that it names stays in LMCache for
        ever.

        `update_state_after_alloc` notes the decoder at each admission, and only a new request takes it out again.""",
        schedule=[admit("r", prompt(300), max_tokens=2, sampling=ASKS), step(), preempt("r"), run(), settle()],
        rule="KVR009",
        text="tmp_disagg_tracker still holds it",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(kv_role="kv_producer"),
    ),
    "preempt-full-hit": Scenario(
        doc="""A preempted request all of whose tokens are in LMCache comes back with one token less than is asserted.

        Another request whose prompt is this one with what was generated since has stored them. The last token has
        to be computed again, so 255 of 256 are there.""",
        schedule=[
            stored_elsewhere(continued(prompt(250), 6)),
            admit("r", prompt(250), max_tokens=16),
            step(6),
            preempt("r"),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Preempted request r has num_computed_tokens 255 but",
        wrong={"lmcache": ">=0.3.10.post1,<0.4.3"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "preempt-local-exceeds-lmcache": Scenario(
        doc="A preempted request of which vLLM has more than LMCache dies on its way back.",
        schedule=[admit("r", prompt(1000), max_tokens=8), step(), preempt("r"), run(), settle()],
        rule="KVR011",
        text="Preempted request r has num_computed_tokens 992 but lmcache_cached_tokens 768",
        wrong={"lmcache": ">=0.3.10.post1,<=0.3.10.post2"},
        options=Options(num_blocks=80, chunk_size=256, max_num_batched_tokens=2048),
    ),
    "preempt-min-retrieve": Scenario(
        doc="""A hit too small to be worth a load is recorded as if it had been loaded: a preempted request dies on its
        way back.

        min_retrieve_tokens 512: of 1,024 tokens in LMCache, 800 are in vLLM, so the connector promises nothing. Its
        LoadSpec says 1,024 all the same, and `build_connector_meta` asserts that the resumed request has as many
        computed tokens.""",
        schedule=[
            admit("r", prompt(1100), max_tokens=8),
            step(),
            preempt("r"),
            keep_blocks(50),  # 800 tokens stay in the prefix cache, 1,024 are in LMCache
            step(),
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Preempted request r has num_computed_tokens 800 but",
        wrong={"lmcache": ">=0.3.14"},
        options=Options(
            num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, lmcache={"min_retrieve_tokens": 512}
        ),
        needs={"lmcache": ">=0.3.14"},
    ),
    "preempt-multiconnector-loser": Scenario(
        doc="""Another connector of a MultiConnector is chosen to load a preempted request, and EngineCore dies on its
        way back.

        vLLM asks all connectors and takes the first that promises something; LMCache's LoadSpec says what it would
        have loaded, and `build_connector_meta` asserts it of the resumed request.""",
        schedule=[
            admit("r", prompt(1100), max_tokens=8),
            step(),
            preempt("r"),
            keep_blocks(50),  # 800 tokens stay in the prefix cache, LMCache has 1,024, the other connector 1,088
            has_in_other_connector("r"),
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Preempted request r has num_computed_tokens 1088 but",
        wrong={"lmcache": ">=0.3.10.post1"},
        options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048, beside=True),
    ),
    "preempt-prompt-logprobs": Scenario(
        doc="""With prompt_logprobs vLLM asks the connector and takes nothing; a preempted request dies on its way back.

        vLLM skips reading prefix caches for such a request (scheduler.py 0.32.0:982), its own and the external one;
        the LoadSpec still says what was hit, and `build_connector_meta` asserts it of the resumed request.""",
        schedule=[
            admit("r", prompt(1100), max_tokens=8, sampling={"prompt_logprobs": 1}),
            step(),
            preempt("r"),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="Preempted request r has num_computed_tokens 0 but",
        # vLLM before 0.31 skips only its own prefix cache for such a request, and takes what the connector has
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.3.10.post1"},
        options=Options(num_blocks=100, chunk_size=256, max_num_batched_tokens=2048),
    ),
    "priority-left-after-resume": Scenario(
        doc="A preempted request is looked up again, and the priority kept for that is never taken out.",
        schedule=[
            admit("r", prompt(300), max_tokens=8),
            step(),
            preempt("r"),
            keep_blocks(10),  # 160 tokens stay in the prefix cache, fewer than LMCache has
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR009",
        text="_requests_priority",
        wrong={"lmcache": ">=0.3.9"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "resume-is-not-known": Scenario(
        doc="""A preempted request is promised what LMCache has, no load is started, and it goes on with KV that is
        not there.""",
        schedule=[
            admit("r", prompt(300), max_tokens=8),
            step(),
            preempt("r"),
            keep_blocks(10),  # 160 tokens stay in the prefix cache, fewer than the 256 that LMCache has
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR006",
        wrong={"lmcache": ">=0.3.9,<0.3.10"},
        options=Options(chunk_size=256, max_num_batched_tokens=512),
    ),
    "resume-shares-block-list": Scenario(
        doc="""A preempted request goes on, its tracker takes blocks of other tokens for its last ones, and stores their
        KV.

        Tracker and worker keep the same list of the blocks that it came back with. Both add those of the third
        step; in the fourth, tokens 384 to 512 are taken to be where 256 to 384 are.""",
        schedule=[
            admit("preempted", prompt(520)),
            step(),
            preempt("preempted"),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(520)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 384 of",
        wrong={"lmcache": ">=0.3.11"},  # before, what is stored has tokens missing too, and is never asked for (KVF002)
        options=Options(max_num_batched_tokens=128),
    ),
    "resume-then-sits-out": Scenario(
        doc="""A preempted request goes on, is left out of a step, and computes in blocks that it has used already.

        Tracker and worker keep the same list of the blocks that it came back with, and both have added those of its
        tokens 256 to 384. When it joins the batch again the worker takes its blocks from there: tokens 384 to 512
        go where 256 to 384 are.""",
        schedule=[
            admit("other", prompt(1, seed=1), max_tokens=20),
            budget(129),
            admit("r", prompt(520)),
            step(),
            preempt("r"),
            step(2),
            budget(1),  # the other one has it
            step(),
            budget(129),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 256 of 512",
        wrong={"lmcache": ">=0.3.10"},
        options=Options(max_num_batched_tokens=129),
    ),
    "resumed-as-new-loses-tokens": Scenario(
        doc="""To vLLM's model runner V2 a resumed request is a new one, and LMCache loads of it what belongs to the
        prompt.

        96 tokens are in the cache, 64 of them the prompt: the conversation has gone on elsewhere. The request has
        generated 33 when it is preempted; 96 of its 97 are hit and promised, and the 32 generated ones are not
        loaded.""",
        schedule=[
            stored_elsewhere(continued(prompt(64), 32)),
            admit("r", prompt(64), max_tokens=40),
            step(33),
            preempt("r"),
            reset_prefix_cache(),
            run(),
            settle(),
        ],
        rule="KVR004",
        text="tokens 0 to 64 are to be loaded",
        wrong={"vllm": ">=0.32", "lmcache": ">=0.3.10"},
        needs={"vllm": ">=0.32"},  # before, the second runner was for trials
        options=Options(chunk_size=32, model_runner_v2=True),
    ),
}
