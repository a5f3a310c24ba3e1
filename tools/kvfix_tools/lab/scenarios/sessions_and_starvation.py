"""Streaming sessions, and requests that wait for each other's blocks."""

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import Options, scenario
from kvfix_tools.lab.scenarios.mp import MP, states
from kvfix_tools.lab.scenarios.pairs import OFFLOAD
from kvfix_tools.lab.steps import prompt

SCENARIOS = {
    "failed-load-reserves-itself": scenario(
        [do.admit("r", prompt(140), max_tokens=8), do.step(6), do.preempt("r")],
        do.keep_blocks(0),  # vLLM's prefix cache has no block of the request when it resumes
        [do.step(), do.free_blocks(), do.fail_load("r")],
        shows="LAB003",
        wrong={"vllm": ">=0.26.0", "lmcache": ">=0.5.6"},
        options=MP(num_blocks=16, max_num_batched_tokens=256),
    ),
    "loaded-requests-lock-out": scenario(
        # "low" has 8 of 20 blocks, is loaded and needs one more block, but no step has tokens left for it. "r" has a
        # higher priority, has loaded 8 of its 16 blocks, and needs 8 more. 4 blocks are free, and `schedule` stops at
        # "r" (scheduler.py 0.32.0:1275-1282). With `scheduler_reserve_full_isl` vLLM would admit "r" only when all 16
        # blocks are free.
        [do.stored_elsewhere(prompt(128)), do.stored_elsewhere(prompt(128, seed=1))],
        [do.admit("running", prompt(16, seed=2), max_tokens=16), do.step()],
        [do.admit("low", prompt(140), max_tokens=2, priority=1), do.step()],
        [do.admit("r", prompt(256, seed=1), max_tokens=2, priority=0), do.step(7)],  # both load
        do.budget(1),  # "running" uses the only token
        [do.step(5), do.budget(256)],
        shows="LAB009 1 request is loaded and waits behind r, which needs 8 blocks; 4 are free",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        options=MP(delay=5, num_blocks=21, max_num_batched_tokens=256, reserve_full_isl=False, policy="priority"),
    ),
    "loads-preempted-in-turn": scenario(
        # With asynchronous scheduling, the router lets a kv_producer generate two tokens. The prompts end with a full
        # block. While one request loads again, the load of the other request ends. Each preemption drops the generated
        # tokens.
        [do.ask("a", prompt(64)), do.ask("b", prompt(64, seed=1))],
        do.run(),  # the OffloadingConnector has both prompts
        [do.ask("r", prompt(64), prefill_tokens=2), do.step(3), do.ask("other", prompt(64, seed=1), prefill_tokens=2)],
        shows="LAB003",
        options=OFFLOAD(offloading="first", delay=5, num_blocks=9, decode_blocks=60, async_scheduling=True),
    ),
    "lookahead-stops-prefill": states(
        # The chunk from token 32 on ends at token 46 of 50, before a block's end. The next chunk gets no token.
        [do.admit("r", prompt(50)), do.budget(16), do.step(4), do.budget(64)],
        shows="LAB003 is RUNNING for ever",
        options=MP(chunk_size=16, max_num_batched_tokens=64, states=True, drafter="mtp", drafts=4, acceptance=50),
    ),
    "preempted-session-lost": scenario(
        [do.admit("r", prompt(30), resumable=True), do.step(), do.preempt("r")],
        [do.add_input("r", prompt(16, seed=1)), do.run(), do.end_input("r")],
        shows="LAB003 for ever",
        wrong={"vllm": ">=0.32,<0.33"},
        needs={"vllm": ">=0.32"},
        options=Options(async_scheduling=True),
    ),
    "session-and-load-lock-out": scenario(
        # "session" takes blocks that were reserved for the load of "r", and keeps them at the end of its turn.
        [do.stored_elsewhere(prompt(264)), do.admit("session", prompt(40, seed=1), max_tokens=12, resumable=True)],
        [do.step(), do.admit("r", prompt(264), max_tokens=2), do.step(30)],
        [do.add_input("session", prompt(48, seed=2)), do.step(30), do.end_input("session")],
        shows="LAB009",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.5"},
        options=MP(delay=20, num_blocks=21, max_num_batched_tokens=256),
    ),
    "session-state-has-drafts": states(
        # The last step computes four tokens, and the turn ends after two.
        [do.admit("r", prompt(20), max_tokens=7, resumable=True), do.add_input("r", prompt(21), max_tokens=5)],
        [do.run(), do.end_input("r")],
        doc="A session's turn ends within accepted drafts: vLLM drops the tokens after its end, but not their state.",
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
    "trimmed-drafts-stay-computed": scenario(
        # A step samples four tokens, but the session may generate only one.
        [do.admit("r", prompt(20), max_tokens=2, resumable=True), do.step(2)],
        [do.add_input("r", prompt(60, seed=1), max_tokens=4), do.run(), do.end_input("r")],
        shows="LAB001 the step reads token 22 of 24 computed ones",
        wrong={"vllm": ">=0.32,<0.33"},
        needs={"vllm": ">=0.32"},
        options=Options(max_num_batched_tokens=128, drafter="eagle", drafts=3, acceptance=100),
    ),
}
