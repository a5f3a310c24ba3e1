"""Streaming sessions, and requests that wait for each other's blocks."""

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
        # vLLM admits a load only if the free blocks exceed the needs of all prefills in flight (scheduler.py
        # 0.32.0:1249). A request whose load failed releases its blocks, but still counts as a prefill in flight.
        schedule=[
            admit("r", prompt(140), max_tokens=8),
            step(6),
            preempt("r"),
            keep_blocks(0),  # vLLM's prefix cache has no block of the request when it resumes
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
        # "low" has 8 of 20 blocks, is loaded and needs one more block, but no step has tokens left for it. "r" has a
        # higher priority, has loaded 8 of its 16 blocks, and needs 8 more. 4 blocks are free, and `schedule` stops at
        # "r" (scheduler.py 0.32.0:1275-1282). With `scheduler_reserve_full_isl` vLLM would admit "r" only when all 16
        # blocks are free.
        schedule=[
            stored_elsewhere(prompt(128)),
            stored_elsewhere(prompt(128, seed=1)),
            admit("running", prompt(16, seed=2), max_tokens=16),
            step(),
            admit("low", prompt(140), max_tokens=2, priority=1),
            step(),
            admit("r", prompt(256, seed=1), max_tokens=2, priority=0),
            step(7),  # both load
            budget(1),  # "running" uses it
            step(5),
            budget(256),
            run(200),
            expect_all_ended(),
        ],
        rule="LAB009",
        text="1 request is loaded and waits behind r, which needs 8 blocks; 4 are free",
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
        # A kv_producer whose router lets it generate two tokens, with asynchronous scheduling. The prompts end with a
        # full block. While one request loads again, the load of the other one ends. Each preemption drops the generated
        # tokens.
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
        # The first steps compute 16 tokens each. The third chunk, from token 32 on, ends at token 46 of 50, before the
        # end of a block, and the next chunk gets no token.
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
        # The session is preempted while the last step of its turn is in flight, and vLLM removes it from all queues. It
        # has its next input by then.
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
        # "session" takes blocks that were reserved for the load of "r", and keeps them at the end of its turn.
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
        doc=(
            "A session's turn ends within accepted drafts: vLLM drops the tokens after its end, but the state "
            "includes them."
        ),
        # The last step computes four tokens, and the turn ends after two. The next input overwrites the KV of
        # attention, but a state cannot be rolled back.
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
        doc="A session's turn ends while its next token is computed: vLLM drops the token, but the state includes it.",
        # Three pipeline stages, so three steps are in flight. The sixth token is computed before vLLM knows that the
        # fifth token ends the turn. The next input overwrites the KV of attention, but a state cannot be rolled back.
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
        # A step brings four tokens, and the session may have one. vLLM drops the others, but counts their KV as
        # computed: two tokens of the next input get their slots and KV.
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
