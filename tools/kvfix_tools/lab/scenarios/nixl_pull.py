"""vLLM's NixlConnector that reads, between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab.scenario import MEMORY, Options, pair_scenario
from kvfix_tools.lab.steps import (
    abort,
    ask,
    ask_decode,
    expect_all_ended,
    fail,
    faults_end,
    malform,
    on,
    prompt,
    router_takes,
    run,
    send_again,
    step,
    step_alone,
    time_passes,
)

pull = partial(pair_scenario, options=Options(connector="nixl-pull"))

SCENARIOS = {
    "nixl-abort-names-no-peer": pull(
        "A request whose parameters lack a key is aborted before it is scheduled: the decode engine dies.",
        [
            malform("no_request"),
            on("decode", "keep_blocks", 0),
            ask("r", prompt(64)),
            step(3),
            abort("r"),
            step(),
            on("decode", "free_blocks"),
            run(),
        ],
        "KVR011",
        text="KeyError: 'remote_request_id'",
        request="",
    ),
    "nixl-decode-blocks-held": pull(
        "With `bidirectional_kv_xfer` a decode engine computes a prompt by itself: its blocks are held for ever.",
        [malform("alone"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB020",
        text="of the decode engine",
        request="",
        options=Options(connector="nixl-pull", extra={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3}),
    ),
    "nixl-handshake-thread-dies": pull(
        """The parameters of a request ask for a rank that the prefill engine does not have: its thread for
        handshakes dies.""",
        [malform("more_ranks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB021",
        text="answers no handshake",
        request="",
    ),
    "nixl-lease-read-twice": pull(
        """A router sends a request to the decode engine again: it reads blocks that are free since the first has
        read them.""",
        [
            ask("r", prompt(64), 2),
            step(2),
            on("decode", "keep_blocks", 0),
            send_again("r"),
            step(4),
            on("prefill", "take_blocks", 60),
            step(),
            ask("s", prompt(32, seed=1)),
            step(),
            on("prefill", "free_blocks"),
            on("decode", "free_blocks"),
            run(),
            expect_all_ended(),
        ],
        "LAB001",
        text="holds other KV",
        request="r-00000003",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-load-into-blocks-in-copy": pull(
        """NIXL loads into blocks of an ended request that the OffloadingConnector still copies: it stores other KV.

        A MultiConnector of both, in a decode engine. The blocks of a load by NIXL are allocated before the request
        is in any step, and the OffloadingConnector waits only for copies of blocks that are allocated in a step.""",
        [
            on("decode", "keep_blocks", 5),
            ask_decode("a", prompt(64)),
            ask("r", prompt(64, seed=1)),  # its load is granted the blocks of "a", when that has ended
            run(),
            on("decode", "free_blocks"),
            expect_all_ended(),
        ],
        "LAB001",
        text="the OffloadingConnector stores other KV",
        request="a-00000002",
        wrong=">=0.32,<0.33",
        options=Options(connector="nixl-offload", offloading="last", delay=3, prefix_caching=False),
    ),
    "nixl-malformed-handshake-fails": pull(
        "The parameters of a request name its blocks in one list, and the handshake fails: the request waits for ever.",
        [malform("flat_blocks"), fail("handshake"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB003",
        text="WAITING_FOR_REMOTE_KVS for ever",
    ),
    "nixl-malformed-read-raises": pull(
        "The parameters of a request name blocks by something that is no number: the decode engine dies.",
        [malform("odd_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="start_load_kv: ValueError",
        request="",
    ),
    "nixl-odd-engine-id": pull(
        "The parameters of a request name the prefill engine by a list: the decode engine dies.",
        [malform("odd_engine"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="add_request: TypeError",
        request="",
    ),
    "nixl-prefill-generates-more": pull(
        """The router lets the prefill engine generate beyond the prompt's last block: all KV is loaded shifted by a
        block.""",
        [ask("r", prompt(64), 2, 5), run(), expect_all_ended()],
        "LAB001",
        text="holds other KV",
    ),
    "nixl-prefill-has-fewer-blocks": pull(
        "The prefill engine names fewer blocks than the prompt has: the decode engine dies.",
        [malform("fewer_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="start_load_kv: AssertionError",
        request="",
    ),
    "nixl-prefill-preempted-at-its-end": pull(
        "A prefill is preempted while its last step is in flight: NixlConnector's worker keeps its id for ever.",
        [
            router_takes(1000),  # the decode engine dies of what it gets (KVF301)
            ask("r", prompt(28)),
            step(3),
            on("prefill", "preempt", "r-00000001"),
            on("prefill", "keep_blocks", 0),  # it does not go on before the answer is there
            step(2),
            on("prefill", "free_blocks"),
            run(),
            expect_all_ended(),
        ],
        "KVR009",
        text="_reqs_to_process",
        request="r-00000001",
        options=Options(connector="nixl-pull", async_scheduling=True, block_size=4, max_num_batched_tokens=13),
        not_in_hooks=MEMORY,
    ),
    "nixl-promise-without-blocks": pull(
        "A request of a decode engine asks for a remote prefill and names no blocks: EngineCore dies.",
        [malform("no_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="schedule: AssertionError",
        request="",
    ),
    "nixl-promise-without-host": pull(
        "A request of a decode engine does not say where the prefill engine is: it waits for ever.",
        [malform("no_host"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR010",
    ),
    "nixl-read-outlives-lease": pull(
        "Both engines hang while a request waits for blocks. Its lease ends, and others write there before it reads.",
        [
            on("decode", "keep_blocks", 0),
            ask("r", prompt(64), 2),
            step(3),
            ask("q", prompt(16, seed=2)),
            time_passes(31.0),
            step_alone("prefill"),
            ask("s", prompt(64, seed=1)),
            step_alone("prefill", 3),
            on("decode", "free_blocks"),
            run(),
            expect_all_ended(),
        ],
        "LAB001",
        text="holds other KV",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=20),
    ),
    "nixl-refused-peer-stays-refused": pull(
        "The parameters of a request name a wrong number of ranks: the two engines never connect any more.",
        [
            malform("other_tp_size"),
            ask("wrong", prompt(64)),
            run(),
            faults_end(),
            ask("r", prompt(64, 1)),
            run(),
            expect_all_ended(),
        ],
        "LAB002",
        text="loaded up to 0 of 64",
    ),
    "nixl-second-load-never-starts": pull(
        """With `bidirectional_kv_xfer` a request that loads the blocks of the turn before is preempted: it waits
        for ever.""",
        [
            malform("decode_too"),
            ask("r", prompt(64), 5),
            step(5),
            on("decode", "preempt", "r-00000002"),
            run(),
            expect_all_ended(),
        ],
        "KVR010",
        options=Options(
            connector="nixl-pull",
            prefix_caching=False,
            extra={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8},
        ),
    ),
    "nixl-second-reader-aborted": pull(
        """A router sends a request again, and gives up the second one before it is asked for: the first reads what
        is free.""",
        [
            on("decode", "keep_blocks", 0),
            ask("r", prompt(64), 2),
            step(3),
            send_again("r"),
            step(),
            on("decode", "abort", "r-00000003"),
            step(3),
            on("prefill", "take_blocks", 60),
            step(),
            ask("s", prompt(32, seed=1)),
            step(),
            on("prefill", "free_blocks"),
            on("decode", "free_blocks"),
            run(),
            expect_all_ended(),
        ],
        "LAB001",
        text="holds other KV",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-turn-without-bidirectional": pull(
        "The parameters name blocks of a turn before, and `bidirectional_kv_xfer` is off: the request waits for ever.",
        [malform("decode_too"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR010",
    ),
    "nixl-window-freed-at-end": pull(
        "The prompt's last token needs one token more than what the prefill engine keeps of a window.",
        [ask("r", prompt(63), 2), run(), expect_all_ended()],
        "LAB001",
        text="the step reads token 47 of 62 computed ones, its slot holds other KV in KV group 1",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
    "nixl-window-freed-meanwhile": pull(
        """The router lets the prefill engine generate more than one token: it frees what the prompt's end needs of
        a window.""",
        [ask("r", prompt(60), 2, prefill_tokens=4), run(), expect_all_ended()],
        "LAB001",
        text="the step reads token 44 of 59 computed ones, its slot holds other KV in KV group 1",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
}
