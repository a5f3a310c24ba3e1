"""vLLM's NixlConnector in push mode, between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab.scenario import CONTENT, MEMORY, REQUEST, Options, pair_scenario
from kvfix_tools.lab.steps import (
    abort,
    ask,
    ask_at_once,
    expect_all_ended,
    fail,
    handshakes_take,
    malform,
    on,
    prompt,
    router_takes,
    run,
    send_again,
    step,
    step_alone,
)

push = partial(pair_scenario, options=Options(connector="nixl-push"))

SCENARIOS = {
    "nixl-push-abort-keeps-blocks": push(
        [fail("setup"), ask("r", prompt(64)), step(6), abort("r"), run(), expect_all_ended()],
        "LAB020",
        doc="Prefill cannot write, and the request is aborted: decode keeps its blocks for ever.",
        text="of the decode engine",
        request="",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
        hooks_rule="KVR009",
    ),
    "nixl-push-abort-stays": push(
        [
            on("decode", "keep_blocks", 0),
            ask("r", prompt(64)),
            step(4),
            abort("r"),
            on("decode", "free_blocks"),
            ask("s", prompt(32), 60),
            run(),
            expect_all_ended(),
        ],
        "KVR009",
        text="_recving_metadata still holds it",
    ),
    "nixl-push-before-all-registered": push(
        [fail("handshake", 1), ask_at_once("r", prompt(64)), run(), expect_all_ended()],
        "KVR022",
        doc="One of two decode ranks cannot connect and fails the load: prefill still writes to it.",
        text="of a request that does not wait",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=REQUEST,
    ),
    "nixl-push-begins-after-lease": push(
        [
            ask_at_once("r", prompt(300)),
            step(3),
            handshakes_take(45),
            step(5),
            step_alone("prefill", 45),
            run(),
            expect_all_ended(),
        ],
        "KVR020",
        doc="Prefill takes long to connect to decode: it writes from blocks whose lease has expired.",
        request="r-00000001",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"kv_lease_duration": 3}),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-engines-wait-for-each-other": push(
        [
            router_takes(10),
            ask("r", prompt(64)),
            step(3),
            ask_at_once("s", prompt(64, seed=1)),
            run(),
            expect_all_ended(),
        ],
        "LAB003",
        doc=(
            "Prefill waits for decode's blocks for one request, and decode waits for prefill's blocks for another "
            "request."
        ),
        text="is WAITING",
        request="s-00000001",
        options=Options(connector="nixl-push", num_blocks=7, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-heartbeat-refuses-peer": push(
        # The heartbeat runs while the request waits for blocks.
        [
            handshakes_take(3),
            on("decode", "take_blocks", 39),
            ask_at_once("r", prompt(64)),
            step(6),
            on("decode", "free_blocks"),
            run(),
            expect_all_ended(),
        ],
        "LAB002",
        text="loaded up to 0 of 64",
        options=Options(
            connector="nixl-push",
            num_blocks=40,
            ranks=2,
            peer_ranks=1,
            extra={"kv_lease_duration": 3, "push_registration_timeout": 30.0},
        ),
    ),
    "nixl-push-never-arrives": push(
        [fail("setup"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB003",
        doc="Prefill cannot write: decode waits for ever.",
        text="WAITING_FOR_REMOTE_KVS",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-notified-before-connected": push(
        [
            fail("handshake", 1),
            ask_at_once("before", prompt(64)),
            step(8),  # one rank has connected, the other one not
            handshakes_take(10),
            ask_at_once("r", prompt(64, 1)),
            run(),
            expect_all_ended(),
        ],
        "KVR011",
        doc="One of two decode ranks is notified of a write before it has connected: decode dies.",
        text="KeyError",
        request="",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-outlives-lease": push(
        [
            ask("r", prompt(64), 2),
            step(5),
            step_alone("prefill", 35),
            ask("s", prompt(64, seed=1)),
            step_alone("prefill", 5),
            run(),
            expect_all_ended(),
        ],
        "KVR021",
        doc=(
            "Decode hangs during a write: the lease expires, and another request writes to blocks that prefill still "
            "sends."
        ),
        request="r-00000001",
        options=Options(
            connector="nixl-push", num_blocks=8, delay=40, prefix_caching=False, extra={"kv_lease_duration": 3}
        ),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-prefill-generates-more": push(
        [ask("r", prompt(64), 2, 5), run(), expect_all_ended()],
        "LAB001",
        text="holds other KV",
    ),
    "nixl-push-promise-without-peer": push(
        [malform("no_host"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="KeyError: 'remote_host'",
        request="",
    ),
    "nixl-push-registration-kept": push(
        # The router sends the request to both engines at once, and aborts it.
        [ask_at_once("r", prompt(300)), step(4), abort("r"), run(), expect_all_ended()],
        "LAB022",
        text="the prefill engine keeps it",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=MEMORY,
    ),
    "nixl-push-second-decode-waits": push(
        [ask("r", prompt(64), 2), step(3), send_again("r"), run(), expect_all_ended()],
        "LAB003",
        text="WAITING_FOR_REMOTE_KVS",
        request="r-00000003",
        # A longer timeout would pass without steps, and after a pause a load may come short.
        options=Options(connector="nixl-push", prefix_caching=False, extra={"push_registration_timeout": 0.5}),
    ),
    "nixl-push-thread-loses-notices": push(
        # One registration has more blocks than an earlier prefill request with the same id.
        [
            router_takes(100),
            ask("r", prompt(32)),
            step(3),
            ask_at_once("r", prompt(200)),
            ask_at_once("s", prompt(200, seed=1)),
            run(),
            expect_all_ended(),
        ],
        "LAB003",
        text="WAITING_FOR_REMOTE_KVS",
        request="s-00000002",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
    ),
}
