"""vLLM's NixlConnector in pull mode, between a prefill and a decode engine."""

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
        # Decode computes the prompt itself.
        [malform("alone"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB020",
        text="of the decode engine",
        request="",
        options=Options(connector="nixl-pull", extra={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3}),
    ),
    "nixl-handshake-thread-dies": pull(
        # The parameters of the request ask for a rank that prefill does not have.
        [malform("more_ranks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB021",
        text="answers no handshake",
        request="",
    ),
    "nixl-lease-read-twice": pull(
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
        doc="A router sends a request to decode again: the second request reads blocks that prefill has freed.",
        text="holds other KV",
        request="r-00000003",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-load-into-blocks-in-copy": pull(
        # A MultiConnector of both, in decode. vLLM allocates the blocks of a load by NIXL before the request is in a
        # step. OffloadingConnector waits only for copies of blocks that are allocated in a step.
        [
            on("decode", "keep_blocks", 5),
            ask_decode("a", prompt(64)),
            ask("r", prompt(64, seed=1)),  # its load gets the blocks of "a", which has ended
            run(),
            on("decode", "free_blocks"),
            expect_all_ended(),
        ],
        "LAB001",
        doc="NIXL loads into blocks of an ended request that OffloadingConnector still copies.",
        text="the OffloadingConnector stores other KV",
        request="a-00000002",
        wrong=">=0.32,<0.33",
        options=Options(connector="nixl-offload", offloading="last", delay=3, prefix_caching=False),
    ),
    "nixl-malformed-handshake-fails": pull(
        [malform("flat_blocks"), fail("handshake"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB003",
        doc=(
            "The parameters of a request name its blocks in a flat list, and the handshake fails: the request waits "
            "for ever."
        ),
        text="WAITING_FOR_REMOTE_KVS for ever",
    ),
    "nixl-malformed-read-raises": pull(
        [malform("odd_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        doc="The parameters of a request name a block by a value that is not a number: the decode worker dies.",
        text="start_load_kv: ValueError",
        request="",
    ),
    "nixl-odd-engine-id": pull(
        [malform("odd_engine"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="add_request: TypeError",
        request="",
    ),
    "nixl-prefill-generates-more": pull(
        [ask("r", prompt(64), 2, 5), run(), expect_all_ended()],
        "LAB001",
        doc="Prefill generates tokens beyond the last block of the prompt: decode loads all KV shifted by a block.",
        text="holds other KV",
    ),
    "nixl-prefill-has-fewer-blocks": pull(
        [malform("fewer_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        doc="Prefill names fewer blocks than the prompt has: the decode engine dies.",
        text="start_load_kv: AssertionError",
        request="",
    ),
    "nixl-prefill-preempted-at-its-end": pull(
        [
            router_takes(1000),  # otherwise decode dies (KVF301)
            ask("r", prompt(28)),
            step(3),
            on("prefill", "preempt", "r-00000001"),
            on("prefill", "keep_blocks", 0),  # the request does not resume before the answer
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
        [malform("no_blocks"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        doc="A request asks for a remote prefill and names no blocks: EngineCore of decode dies.",
        text="schedule: AssertionError",
        request="",
    ),
    "nixl-promise-without-host": pull(
        [malform("no_host"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR010",
        doc="A request does not name the host of its prefill engine: it waits for ever.",
    ),
    "nixl-read-outlives-lease": pull(
        # Both engines hang while the request waits for blocks. Its lease expires, and another request writes to the
        # blocks.
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
        [
            malform("decode_too"),
            ask("r", prompt(64), 5),
            step(5),
            on("decode", "preempt", "r-00000002"),
            run(),
            expect_all_ended(),
        ],
        "KVR010",
        doc=(
            "With `bidirectional_kv_xfer` a request that loads the blocks of the previous turn is preempted: it waits "
            "for ever."
        ),
        options=Options(
            connector="nixl-pull",
            prefix_caching=False,
            extra={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8},
        ),
    ),
    "nixl-second-reader-aborted": pull(
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
        doc="A router sends a request again and aborts the second one: the first request reads freed blocks.",
        text="holds other KV",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-turn-without-bidirectional": pull(
        [malform("decode_too"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR010",
        doc="A request names blocks of the previous turn, but `bidirectional_kv_xfer` is off: it waits for ever.",
    ),
    "nixl-window-freed-at-end": pull(
        [ask("r", prompt(63), 2), run(), expect_all_ended()],
        "LAB001",
        doc="Recomputing the last prompt token needs one token more than prefill keeps of the window.",
        text="the step reads token 47 of 62 computed ones, its slot holds other KV in KV group 1",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
    "nixl-window-freed-meanwhile": pull(
        [ask("r", prompt(60), 2, prefill_tokens=4), run(), expect_all_ended()],
        "LAB001",
        doc="Prefill generates more than one token and frees blocks of the window that decode needs.",
        text="the step reads token 44 of 59 computed ones, its slot holds other KV in KV group 1",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
}
