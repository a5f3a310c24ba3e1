"""vLLM's MooncakeConnector, between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab.scenario import MEMORY, REQUEST, Options, pair_scenario
from kvfix_tools.lab.steps import (
    abort,
    ask,
    ask_at_once,
    ask_decode,
    budget,
    ends_at_once,
    expect_all_ended,
    free_blocks,
    handshakes_take,
    malform,
    on,
    prompt,
    restart,
    run,
    send_again,
    step,
    time_passes,
)

mooncake = partial(pair_scenario, options=Options(connector="mooncake", prefix_caching=False, num_blocks=60))

SCENARIOS = {
    "mooncake-abort-names-no-peer": mooncake(
        [
            malform("no_address"),
            on("decode", "take_blocks", 60),
            ask("r", prompt(64)),
            step(4),
            abort("r"),
            free_blocks(),
            ask("s", prompt(32, seed=1)),
            step(4),
        ],
        "KVR011",
        text="KeyError",
        request="",
    ),
    "mooncake-aborted-prefill-awaited": mooncake(
        [on("prefill", "budget", 16), ask_at_once("r", prompt(64), 5), step(3), abort("r"), run()],
        "LAB026",
        text="has ended and is not sent",
    ),
    "mooncake-decode-reads-twice": mooncake(
        [ask("r", prompt(64), 2), step(6), send_again("r"), run(), expect_all_ended()],
        "LAB003",
        doc="A router sends a request to decode again while its KV is written: the second request waits for ever.",
        text="for ever",
        request="r-00000003",
        wrong=">=0.32,<0.33",
        options=Options(connector="mooncake", prefix_caching=False, num_blocks=60, delay=5),
    ),
    "mooncake-load-ends-again": mooncake(
        # Prefill dies after it has written one of the two loads of a message.
        [
            budget(16),
            ask_at_once("r", prompt(16)),
            ask_at_once("s", prompt(200, seed=1)),
            step(8),
            restart("prefill", 60),
            time_passes(541.0),
            run(),
            expect_all_ended(),
        ],
        "KVR011",
        request="",
        wrong=">=0.32,<0.33",
        not_in_hooks=REQUEST,
    ),
    "mooncake-load-left-out": mooncake(
        [
            on("prefill", "budget", 8),
            on("decode", "take_blocks", 60),
            ask_at_once("r", prompt(64), 2),
            step(),
            on("decode", "abort", "r-00000002"),
            on("decode", "free_blocks"),
            step(),
            send_again("r"),
            run(),
            expect_all_ended(),
        ],
        "LAB003",
        text="for ever",
        request="r-00000003",
        wrong=">=0.32,<0.33",
    ),
    "mooncake-prefill-generates-more": mooncake(
        [ask("r", prompt(60), 5, 20), run(), expect_all_ended()],
        "LAB001",
        text="holds other KV",
    ),
    "mooncake-promise-without-peer": mooncake(
        # The request does not name its prefill instance.
        [malform("no_address"), ask("r", prompt(64)), run()],
        "KVR010",
        text="never started",
    ),
    "mooncake-second-reader-aborted": mooncake(
        [
            ask("r", prompt(64), 2),
            step(3),
            send_again("r"),
            on("decode", "abort", "r-00000003"),
            run(),
            expect_all_ended(),
        ],
        "KVR021",
        doc=(
            "A router sends a request to decode again, and the second request is aborted: prefill frees blocks that "
            "it still writes."
        ),
        request="r-00000001",
        options=Options(connector="mooncake", prefix_caching=False, num_blocks=60, delay=5),
        not_in_hooks=REQUEST,
    ),
    "mooncake-stopped-prefill-unsent": mooncake(
        [ends_at_once("r", prompt(64)), ask("r", prompt(64), 5), run()],
        "LAB026",
        text="has ended and is not sent",
    ),
    "mooncake-transfer-kept-for-ever": mooncake(
        [malform("other_transfer"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB022",
        text="the prefill engine keeps it",
        request="other",
        not_in_hooks=MEMORY,
    ),
    "mooncake-write-outlives-load": mooncake(
        # Prefill reads decode's message when decode has already dropped the load.
        [
            ask("a", prompt(32, seed=2)),
            run(),
            on("prefill", "take_blocks", 60),
            handshakes_take(20),
            ask_at_once("r", prompt(64)),
            step(2),
            time_passes(541.0),
            step(2),
            on("prefill", "free_blocks"),
            ask_decode("s", prompt(200, seed=1), 40),
            run(),
            expect_all_ended(),
        ],
        "LAB001",
        request="s-00000002",
        options=Options(
            connector="mooncake", prefix_caching=False, num_blocks=60, decode_blocks=18, kv_load_failure_policy="fail"
        ),
    ),
}
