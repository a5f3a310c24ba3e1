"""vLLM's OffloadingConnector and SimpleCPUOffloadConnector, alone or beside LMCache's."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    add_input,
    admit,
    budget,
    end_input,
    evict,
    expect_all_ended,
    fail_load,
    free_blocks,
    keep_blocks,
    new_weights,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIOS = {
    "failed-load-is-offloaded": Scenario(
        doc="""A load of LMCache's fails, and the OffloadingConnector beside it stores the blocks under valid keys.

        A MultiConnector of both. The OffloadingConnector plans its stores with the step, and copies the blocks at
        the beginning of the next one, whether or not LMCache has filled them.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            fail_load("r"),
            admit("r", prompt(300), max_tokens=4),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the OffloadingConnector stores other KV",
        wrong={"vllm": ">=0.32"},
        options=Options(offloading="last", max_num_batched_tokens=512),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "load-after-reset-asserts": Scenario(
        doc="""A request is preempted between two steps, as by a reset, and loads from the OffloadingConnector in the
        next.

        EngineCore dies: the OffloadingConnector asserts that what is in flight of a preempted request is a store.""",
        schedule=[
            admit("r", prompt(300), max_tokens=30),
            step(10),  # its prompt is stored
            preempt("r"),
            keep_blocks(10),  # vLLM's prefix cache loses its end
            free_blocks(),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="schedule: AssertionError",
        request="",
        wrong={"vllm": ">=0.32,<0.33"},
        options=Options(connector="mp", offloading="first", delay=0, max_num_batched_tokens=512),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "mp-load-into-blocks-in-copy": Scenario(
        doc="""LMCache loads into blocks of an ended request that the OffloadingConnector still copies: it stores other
        KV.

        A MultiConnector of both. For a load between steps the blocks are allocated before the request is in any
        step, and the OffloadingConnector waits only for copies of blocks that are allocated in a step.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            stored_elsewhere(prompt(256, seed=1)),
            keep_blocks(20),
            admit("a", prompt(256)),  # LMCache has it, and stores nothing that would keep the blocks
            admit("r", prompt(256, seed=1)),  # its load is granted the blocks of "a", when that has ended
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the OffloadingConnector stores other KV",
        wrong={"vllm": ">=0.32,<0.33"},
        options=Options(connector="mp", offloading="last", delay=3, max_num_batched_tokens=128, prefix_caching=False),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
        request="a",
    ),
    "offload-copy-fails": Scenario(
        doc="A copy of the OffloadingConnector's fails, and the worker dies.",
        schedule=[
            admit("before", prompt(128)),
            run(),
            reset_prefix_cache(),
            fail_load("r"),
            admit("r", prompt(128), max_tokens=3),
            run(),
            settle(),
        ],
        rule="KVR011",
        text="wait_for_save: AssertionError",
        wrong={"vllm": ">=0.32"},
        options=Options(connector="offloading", max_num_batched_tokens=512),
        request="",
    ),
    "offload-promotions-go-round": Scenario(
        doc="""A request has more in a tier of the OffloadingConnector than its CPU memory holds, and is promoted for
        ever.

        Each lookup takes room for the next chunk, and evicts one that the lookup before has asked for.""",
        schedule=[
            budget(4),  # each chunk is in the tier before the next one is computed
            admit("before", prompt(193)),
            run(),
            reset_prefix_cache(),
            admit("r", prompt(193), max_tokens=2),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB003",
        text="is WAITING for ever",
        wrong={"vllm": ">=0.32"},
        options=Options(
            connector="offloading", tier="fs", cpu_blocks=4, max_num_batched_tokens=32, extra={"blocks_per_chunk": 2}
        ),
    ),
    "offload-reset-keeps-files": Scenario(
        doc="""The weights change, and the OffloadingConnector loads KV of the old ones from the files of its tier.

        Its CPU memory is emptied, and the connector reports that all is.""",
        schedule=[
            admit("before", prompt(128)),
            run(),
            new_weights(),
            admit("r", prompt(128), max_tokens=3),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="its slot holds other KV",
        wrong={"vllm": ">=0.32"},
        options=Options(connector="offloading", tier="fs", max_num_batched_tokens=512),
    ),
    "offload-window-chunk-stored-in-part": Scenario(
        doc="""A window begins within a chunk, and the OffloadingConnector stores the end of the chunk as if it were all
        of it.

        Another request, whose window begins elsewhere, loads what was in the CPU memory before.""",
        schedule=[
            admit("before", prompt(129)),
            run(),
            evict(100),
            # vLLM has 128 tokens, and of the window blocks 5 to 7: of blocks 4 and 5, a chunk, the second is stored
            admit("hit", prompt(130)),
            run(),
            admit("shorter", prompt(97)),  # of its window, blocks 3 to 5, blocks 4 and 5 count as stored
            run(),
            reset_prefix_cache(),
            admit("r", prompt(120), max_tokens=2),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="in KV group 1",
        wrong={"vllm": ">=0.32"},
        options=Options(
            connector="offloading",
            windows=(40,),
            num_blocks=128,
            max_num_batched_tokens=512,
            extra={"blocks_per_chunk": 2},
        ),
    ),
    "session-offloads-other-blocks": Scenario(
        doc="""A session gets more input, and the OffloadingConnector stores its first blocks under the keys of later
        ones.

        With its input a session is scheduled as a new request, with all its blocks, which are added to those known.""",
        schedule=[
            admit("r", prompt(40), resumable=True),
            run(5),
            add_input("r", prompt(100, seed=1)),
            run(5),
            end_input("r"),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the OffloadingConnector stores other KV",
        wrong={"vllm": ">=0.32,<0.33"},
        options=Options(offloading="last"),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "simple-offload-copy-fails": Scenario(
        doc="A copy of the SimpleCPUOffloadConnector's fails, and its thread ends: the request waits for ever.",
        schedule=[
            admit("before", prompt(128)),
            run(),
            settle(),
            reset_prefix_cache(),
            fail_load("r"),
            admit("r", prompt(128), max_tokens=3),
            run(),
            expect_all_ended(),
        ],
        rule="LAB003",
        wrong={"vllm": ">=0.32"},
        options=Options(connector="simple-offload", max_num_batched_tokens=512),
        not_in_hooks="the load was started, and a hook does not say how long it takes",
    ),
    "simple-offload-never-rests": Scenario(
        doc="""More prompts than its CPU memory holds, with `lazy_offload`: the SimpleCPUOffloadConnector copies
        them for ever.""",
        schedule=[admit("r", prompt(480)), run(200), settle()],
        rule="LAB029",
        wrong={"vllm": ">=0.32"},
        request="",
        options=Options(
            connector="simple-offload",
            extra={"lazy_offload": True},
            cpu_blocks=16,
            max_num_batched_tokens=32,
            num_blocks=34,
        ),
        not_in_hooks="no hook is called wrongly: that the same blocks come again is no rule of it",
    ),
    "simple-offload-store-asserts": Scenario(
        doc="""A load of LMCache's fails, and EngineCore dies at the end of the SimpleCPUOffloadConnector's store of its
        blocks.

        As in simple-offload-stores-failed-load. With `kv_load_failure_policy=fail`, the default, vLLM takes the
        keys from the blocks, and the connector insists on them.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            fail_load("r"),
            admit("r", prompt(300), max_tokens=4),
            admit("other", prompt(50, seed=1), max_tokens=8),  # the engine goes on
            run(),
            settle(),
        ],
        rule="KVR011",
        text="update_from_output: AssertionError",
        wrong={"vllm": ">=0.32"},
        options=Options(
            offloading="last", simple_offloading=True, max_num_batched_tokens=512, kv_load_failure_policy="fail"
        ),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "simple-offload-stores-failed-load": Scenario(
        doc="""A load of LMCache's fails, and the SimpleCPUOffloadConnector beside it stores the blocks under valid
        keys.

        A MultiConnector of both. It takes tokens that are to be loaded in a step for computed, and stores their
        blocks in it. They are computed anew into the same blocks, which then have their keys when the store is
        over.""",
        schedule=[
            stored_elsewhere(prompt(256)),
            fail_load("r"),
            admit("r", prompt(300), max_tokens=4),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="the SimpleCPUOffloadConnector stores other KV",
        wrong={"vllm": ">=0.32"},
        options=Options(offloading="last", simple_offloading=True, max_num_batched_tokens=512),
        needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    ),
    "simple-offload-window-not-loaded": Scenario(
        doc="""vLLM keeps more than the window, and the SimpleCPUOffloadConnector loads the window: the rest is cached
        all the same.

        Another request, whose window begins there, reads what was in the block before.""",
        schedule=[
            admit("before", prompt(145)),
            run(),
            settle(),
            reset_prefix_cache(),
            admit("loads", prompt(145)),
            run(),
            admit("r", [*prompt(120), 5, 5, 5], max_tokens=2),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="in KV group 1",
        wrong={"vllm": ">=0.32"},
        options=Options(
            connector="simple-offload",
            windows=(64,),
            drafter="mtp",
            drafts=5,
            acceptance=100,
            num_blocks=128,
            max_num_batched_tokens=512,
        ),
    ),
}
