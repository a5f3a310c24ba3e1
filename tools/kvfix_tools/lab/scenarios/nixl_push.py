"""vLLM's NixlConnector that writes, between a prefill and a decode engine."""

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
        "The prefill engine cannot write, and the request is aborted: the decode engine keeps its blocks for ever.",
        [fail("setup"), ask("r", prompt(64)), step(6), abort("r"), run(), expect_all_ended()],
        "LAB020",
        text="of the decode engine",
        request="",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
        hooks_rule="KVR009",
    ),
    "nixl-push-abort-stays": push(
        "A request is aborted before the decode engine has blocks for it: its worker waits for it for ever.",
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
        "One of two ranks of the decode engine cannot connect and fails the load: prefill writes to it all the same.",
        [fail("handshake", 1), ask_at_once("r", prompt(64)), run(), expect_all_ended()],
        "KVR022",
        text="does not wait for that",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=REQUEST,
    ),
    "nixl-push-begins-after-lease": push(
        "The prefill engine takes long to connect to the decode engine: it writes from blocks that are free.",
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
        request="r-00000001",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"kv_lease_duration": 3}),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-engines-wait-for-each-other": push(
        "One request is done in prefill and waits for decode's blocks, another one has them and waits for prefill's.",
        [
            router_takes(10),
            ask("r", prompt(64)),
            step(3),
            ask_at_once("s", prompt(64, seed=1)),
            run(),
            expect_all_ended(),
        ],
        "LAB003",
        text="is WAITING",
        request="s-00000001",
        options=Options(connector="nixl-push", num_blocks=7, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-heartbeat-refuses-peer": push(
        """A request waits for blocks while its heartbeat tries to connect to ranks that share a KV head: its load
        fails.""",
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
        "The prefill engine cannot write: the decode engine waits for ever.",
        [fail("setup"), ask("r", prompt(64)), run(), expect_all_ended()],
        "LAB003",
        text="WAITING_FOR_REMOTE_KVS",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-notified-before-connected": push(
        "One of two ranks of the decode engine gets the notice of a write while it connects yet: the engine dies.",
        [
            fail("handshake", 1),
            ask_at_once("before", prompt(64)),
            step(8),  # one rank has connected, the other has not
            handshakes_take(10),
            ask_at_once("r", prompt(64, 1)),
            run(),
            expect_all_ended(),
        ],
        "KVR011",
        text="KeyError",
        request="",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-outlives-lease": push(
        "The decode engine hangs while it is written to: the lease ends, and others write where the write reads.",
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
        request="r-00000001",
        options=Options(
            connector="nixl-push", num_blocks=8, delay=40, prefix_caching=False, extra={"kv_lease_duration": 3}
        ),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-prefill-generates-more": push(
        """The router lets the prefill engine generate beyond the prompt's last block: all KV is written shifted by
        a block.""",
        [ask("r", prompt(64), 2, 5), run(), expect_all_ended()],
        "LAB001",
        text="holds other KV",
    ),
    "nixl-push-promise-without-peer": push(
        "The parameters of one request do not say where the prefill engine is: the decode engine dies.",
        [malform("no_host"), ask("r", prompt(64)), run(), expect_all_ended()],
        "KVR011",
        text="KeyError: 'remote_host'",
        request="",
    ),
    "nixl-push-registration-kept": push(
        """The router sends a request to both engines at once, and gives it up: the prefill engine keeps its
        registration.""",
        [ask_at_once("r", prompt(300)), step(4), abort("r"), run(), expect_all_ended()],
        "LAB022",
        text="the prefill engine keeps it",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=MEMORY,
    ),
    "nixl-push-second-decode-waits": push(
        "A router sends a request to decode again: its prefill is pushed to one of the two, the other waits for ever.",
        [ask("r", prompt(64), 2), step(3), send_again("r"), run(), expect_all_ended()],
        "LAB003",
        text="WAITING_FOR_REMOTE_KVS",
        request="r-00000003",
        # Its end comes while the steps go on: else it would be a pause, after which a load may come short.
        options=Options(connector="nixl-push", prefix_caching=False, extra={"push_registration_timeout": 0.5}),
    ),
    "nixl-push-thread-loses-notices": push(
        """A registration is for more blocks than the prefill engine has of an earlier request of this id: others
        are lost.""",
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
