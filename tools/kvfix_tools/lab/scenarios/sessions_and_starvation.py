"""Sessions, and requests that wait for blocks of one another."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    add_input,
    admit,
    ask,
    budget,
    end_input,
    expect_all_ended,
    fail_load,
    free_blocks,
    keep_blocks,
    preempt,
    prompt,
    run,
    settle,
    step,
    stored_elsewhere,
)

SCENARIOS = {
    "failed-load-reserves-itself": Scenario(
        doc="""A load failed, the request is to be loaded again: vLLM keeps blocks back for it, from itself, and it
        never starts.

        vLLM admits a load only if the free blocks are more than all prefills in flight still need (scheduler.py
        0.32.0:1249). A request whose load failed gives its blocks back and stays among them.""",
        schedule=[
            admit("r", prompt(140), max_tokens=8),
            step(6),
            preempt("r"),
            keep_blocks(0),  # vLLM's own prefix cache has none of it when it comes back
            step(),
            free_blocks(),
            fail_load("r"),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB003",
        wrong={"vllm": ">=0.26.0", "lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.4.5"},
        options=Options(connector="mp", num_blocks=16, max_num_batched_tokens=256),
    ),
    "loaded-requests-lock-out": Scenario(
        doc="""Two requests are loaded; the first by priority needs more blocks than are free, the other is not asked:
        for ever.

        "low" has 8 of 20 blocks, loaded, and needs one more; no step has room for it at first. "r" has a higher
        priority: 8 of its 16 blocks are loaded, which "low" leaves free. For its next step it needs 8 more, 4 are
        free, and `schedule` stops there (scheduler.py 0.32.0:1275-1282). With `scheduler_reserve_full_isl` "r"
        would be admitted when all 16 are free.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            stored_elsewhere(prompt(128, seed=1)),
            admit("running", prompt(16, seed=2), max_tokens=16),
            step(),
            admit("low", prompt(140), max_tokens=2, priority=1),
            step(),
            admit("r", prompt(256, seed=1), max_tokens=2, priority=0),
            step(7),  # both load
            budget(1),  # which "running" takes
            step(5),
            budget(256),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB009",
        text="1 request is loaded and waits behind r, which needs 8 blocks; 4 can be had",
        wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        needs={"lmcache": ">=0.4.5", "vllm": ">=0.32.0"},
        options=Options(
            connector="mp",
            delay=5,
            num_blocks=21,
            max_num_batched_tokens=256,
            reserve_full_isl=False,
            policy="priority",
        ),
    ),
    "loads-preempted-in-turn": Scenario(
        doc="""Two loads hold all blocks: each in turn runs, needs one more, and is preempted; what it has generated is
        dropped.

        A prefill engine, role kv_producer, whose router lets it generate two tokens, with asynchronous scheduling.
        The prompts end with a block. While one request loads again, the load of the other is done.""",
        schedule=[
            ask("a", prompt(64)),
            ask("b", prompt(64, seed=1)),
            run(),  # the OffloadingConnector has both prompts
            ask("r", prompt(64), prefill_tokens=2),
            step(3),
            ask("other", prompt(64, seed=1), prefill_tokens=2),
            run(500),
            expect_all_ended(),
        ],
        rule="LAB003",
        request="r-00000001",
        wrong={"vllm": ">=0.32"},
        options=Options(
            connector="nixl-offload",
            offloading="first",
            delay=5,
            num_blocks=9,
            decode_blocks=60,
            prefix_caching=False,
            async_scheduling=True,
        ),
        needs={"vllm": ">=0.32"},
    ),
    "lookahead-stops-prefill": Scenario(
        doc="""Two tokens after the last whole block, and four MTP modules: a chunk ends before the block, the next has
        no token.

        Others leave 16 tokens of a step's budget. The third chunk, from token 32 on, ends at token 46 of 50.""",
        schedule=[admit("r", prompt(50)), budget(16), step(4), budget(64), run(100), expect_all_ended()],
        rule="LAB003",
        text="is RUNNING for ever",
        wrong={"vllm": ">=0.32"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        options=Options(
            connector="mp",
            chunk_size=16,
            max_num_batched_tokens=64,
            states=True,
            drafter="mtp",
            drafts=4,
            acceptance=50,
        ),
    ),
    "preempted-session-lost": Scenario(
        doc="""A session is preempted while the step that ends its turn is in flight: it is taken out of all queues.

        It has got its next input meanwhile, and waits for ever. The scheduler says that it has nothing to do.""",
        schedule=[
            admit("r", prompt(30), resumable=True),
            step(),
            preempt("r"),
            add_input("r", prompt(16, seed=1)),
            run(),
            end_input("r"),
            run(),
            expect_all_ended(),
        ],
        rule="LAB003",
        text="for ever",
        wrong={"vllm": ">=0.32,<0.33"},
        needs={"vllm": ">=0.32"},
        options=Options(async_scheduling=True),
    ),
    "session-and-load-lock-out": Scenario(
        doc="""A session has input and needs more blocks, a load is done and needs one more: each holds what the other
        needs.

        "session" took blocks that were reserved for "r", whose load was on its way, and keeps them when its turn
        has ended.""",
        schedule=[
            stored_elsewhere(prompt(264)),
            admit("session", prompt(40, seed=1), max_tokens=12, resumable=True),
            step(),
            admit("r", prompt(264), max_tokens=2),
            step(30),
            add_input("session", prompt(48, seed=2)),
            step(30),
            end_input("session"),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB009",
        wrong={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        needs={"lmcache": ">=0.4.5", "vllm": ">=0.32.0"},
        options=Options(connector="mp", delay=20, num_blocks=21, max_num_batched_tokens=256),
    ),
    "session-state-has-drafts": Scenario(
        doc="""A session's turn ends within accepted drafts: the tokens after its end are dropped, and the state has
        them.

        Of four tokens that the last step has computed the turn's end leaves two. The KV of attention is overwritten
        by that of the input; a state cannot go back.""",
        schedule=[
            admit("r", prompt(20), max_tokens=7, resumable=True),
            add_input("r", prompt(21), max_tokens=5),
            run(),
            end_input("r"),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token",
        wrong={"vllm": ">=0.32"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        options=Options(connector="mp", states=True, drafter="mtp", drafts=3, acceptance=100),
    ),
    "session-state-runs-ahead": Scenario(
        doc="""A session's turn ends while its next token is computed: the token is dropped, and the state has it.

        Three stages, so three steps are in flight. The sixth token is computed before vLLM knows that the fifth was
        the last one of the turn. The KV of attention is overwritten by that of the input; a state cannot go back.""",
        schedule=[
            admit("r", prompt(1), max_tokens=5, resumable=True),
            add_input("r", prompt(21), max_tokens=5),
            run(),
            end_input("r"),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 4 of 5 computed ones, its slot holds other KV in KV group 1",
        wrong={"vllm": ">=0.32"},
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        options=Options(connector="mp", ranks=3, pipeline=True, async_scheduling=True, states=True),
    ),
    "trimmed-drafts-stay-computed": Scenario(
        doc="""A session's turn ends within accepted drafts, and the first tokens of its next input are never computed.

        Of four tokens that a step has brought, the session may have one. vLLM drops the others, but counts their KV
        as computed: two tokens of the input get the slots, and the KV, of tokens that are gone.""",
        schedule=[
            admit("r", prompt(20), max_tokens=2, resumable=True),
            step(2),
            add_input("r", prompt(60, seed=1), max_tokens=4),
            run(),
            end_input("r"),
            settle(),
        ],
        rule="LAB001",
        text="the step reads token 22 of 24 computed ones",
        wrong={"vllm": ">=0.32,<0.33"},
        needs={"vllm": ">=0.32"},
        options=Options(max_num_batched_tokens=128, drafter="eagle", drafts=3, acceptance=100),
    ),
}
