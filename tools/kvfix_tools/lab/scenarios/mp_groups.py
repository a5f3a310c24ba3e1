"""LMCache's multi-process connector and models with several KV groups."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    evict,
    expect_all_ended,
    expect_unharmed,
    lookups_fail,
    lose_loads,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIOS = {
    "mp-failed-load-of-groups": Scenario(
        doc="""A model with a sliding window: the load of a request fails, its connector reports blocks, and
        EngineCore dies.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            admit("r", prompt(200), max_tokens=2),
            step(2),
            lose_loads(),  # the load was in flight
            run(),
            expect_unharmed("r"),
            settle(),
        ],
        rule="KVR011",
        text="RuntimeError",
        wrong={"lmcache": ">=0.4.7,<0.5.6", "vllm": ">=0.32"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        options=Options(connector="mp", num_blocks=60, windows=(64,)),
    ),
    "mp-state-freed-while-stored": Scenario(
        doc="A state is stored, two steps later vLLM has freed its block, and the request writes a later one to it.",
        schedule=[admit("r", prompt(256), max_tokens=2), run(), settle()],
        rule="LAB001",
        text="is stored under their key",
        wrong={"lmcache": ">=0.5.4"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        not_in_hooks="the block is used again when the next step is over, and the store may be done by then",
        options=Options(
            connector="mp",
            num_blocks=24,
            chunk_size=16,
            max_num_batched_tokens=16,
            states=True,
            separate_object_groups=True,
            delay=20,
        ),
    ),
    "mp-state-kept-null": Scenario(
        doc="""A step computes three blocks, and the last one has a state: in one object the chunks of the others
        are stored too.""",
        schedule=[
            admit("first", prompt(110)),
            run(),
            reset_prefix_cache(),
            admit("short", prompt(40)),
            run(),
            settle(),
        ],
        request="short",
        rule="LAB001",
        text="in KV group 1",
        wrong={"lmcache": ">=0.5.4"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        options=Options(connector="mp", chunk_size=16, max_num_batched_tokens=48, states=True),
    ),
    "mp-state-stored-null": Scenario(
        doc="""A chunk of two blocks ends within a step: its state is null, and the server stores it, for the other
        block is one.

        vLLM keeps a state at the end of each step, here at 48 and 96 tokens, in the third and the sixth block. The
        second chunk has the third block and the fourth, which is null.""",
        schedule=[
            admit("first", prompt(110)),
            run(),
            reset_prefix_cache(),
            admit("short", prompt(70)),
            run(),
            settle(),
        ],
        request="short",
        rule="LAB001",
        text="in KV group 1",
        wrong={"lmcache": ">=0.5.4"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(
            connector="mp", chunk_size=32, max_num_batched_tokens=48, states=True, separate_object_groups=True
        ),
    ),
    "mp-window-freed-at-end": Scenario(
        doc="""A request ends while its store is in flight: vLLM frees what is in the window no more, and others
        write to it.""",
        schedule=[
            admit("r", prompt(256)),
            step(),
            # one step later than "r" it takes the blocks that are in the window no more, and writes to them
            admit("other", prompt(288, seed=1)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="is stored under their key",
        wrong={"lmcache": ">=0.4.7"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=60, windows=(64,), max_num_batched_tokens=1024, delay=4),
    ),
    "mp-window-freed-while-stored": Scenario(
        doc="A store is in flight, the window moves on, others write to its blocks: their KV is stored under its keys.",
        schedule=[
            admit("r", prompt(256), max_tokens=20),
            step(),
            # one step later than "r" it takes the blocks that are in the window no more, and writes to them
            admit("other", prompt(288, seed=1)),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="is stored under their key",
        wrong={"lmcache": ">=0.4.7"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=60, windows=(64,), max_num_batched_tokens=1024, delay=4),
    ),
    "mp-window-loaded-short": Scenario(
        doc="""In front of a window vLLM keeps two tokens for three MTP modules: their block is not loaded, and is
        cached.

        Of "r" 128 tokens are loaded, of the window of 32 the last two blocks. vLLM has a third, from token 80 on,
        and caches it. "other", for which LMCache finds nothing, hits 112 tokens in vLLM and reads from token 81 on.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            admit("r", prompt(160), max_tokens=2),
            run(),
            lookups_fail(1),
            admit("other", prompt(128) + prompt(40, seed=1), max_tokens=2),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="in KV group 1",
        wrong={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        options=Options(connector="mp", num_blocks=60, windows=(32,), drafter="mtp", drafts=3, acceptance=50),
    ),
    "mp-window-reserves-too-little": Scenario(
        doc="""Two requests are loaded, and each needs more blocks than are free: what the window needs was not
        reserved.

        Of 320 tokens 256 are loaded: 16 blocks of full attention, and one of the window behind 15 null blocks. The
        rest takes 4 blocks of each. vLLM reserves 4 for "r" when it admits the load of "other": 5 of 39 blocks stay
        free.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            stored_elsewhere(prompt(256, seed=1)),
            admit("r", prompt(320), max_tokens=2),
            admit("other", prompt(320, seed=1), max_tokens=2),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB009",
        text="1 request is loaded and waits behind r, which needs 8 blocks; 5 can be had",
        wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.7"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32.0"},
        options=Options(connector="mp", num_blocks=40, windows=(16,), max_num_batched_tokens=64),
    ),
    "mp-window-stored-late": Scenario(
        doc="""After a failed load the store is late by the prefix hit: the blocks of the window that it reads are
        others' by then.

        vLLM has 64 tokens, the cache 128; the load fails. The tracker then counts from 0, and stores each chunk 64
        tokens after it was computed.""",
        schedule=[
            admit("short", prompt(65)),
            run(),
            stored_elsewhere(prompt(128)),
            admit("r", prompt(400), max_tokens=2),
            step(2),
            lose_loads(),  # the load was in flight
            run(),
            settle(),
        ],
        rule="LAB001",
        text="is stored under their key",
        wrong={"lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.5.6", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=32, windows=(64,), max_num_batched_tokens=16),
    ),
    "mp-window-stored-null": Scenario(
        doc="""vLLM has a prefix that LMCache has evicted: null blocks of a window are stored, and a later, shorter hit
        reads them.

        After the prefix hit of `r` its list of blocks in the window's KV group begins with null block 0.""",
        schedule=[
            admit("first", prompt(256)),
            run(),
            evict(4),
            admit("r", prompt(512)),
            run(),
            reset_prefix_cache(),
            admit("short", prompt(100)),
            run(),
            settle(),
        ],
        request="short",
        rule="LAB001",
        text="the step reads token",
        wrong={"lmcache": ">=0.4.7"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=60, windows=(64,)),
    ),
}
