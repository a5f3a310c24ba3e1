"""vLLM's NixlConnector in push mode, between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import CONTENT, MEMORY, REQUEST, Options, scenario
from kvfix_tools.lab.steps import malformed, prompt

push = partial(scenario, options=Options(connector="nixl-push"))

SCENARIOS = {
    "nixl-push-abort-keeps-blocks": push(
        [do.fail("setup"), do.ask("r", prompt(64)), do.step(6), do.abort("r")],
        shows="LAB020 of the decode engine",
        doc="Prefill cannot write, and the request is aborted: decode keeps its blocks for ever.",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
        hooks_rule="KVR009",
    ),
    "nixl-push-abort-stays": push(
        [do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64)), do.step(4)],
        [do.abort("r"), do.on("decode", "free_blocks"), do.ask("s", prompt(32), 60)],
        shows="KVR009 _recving_metadata still holds it",
    ),
    "nixl-push-before-all-registered": push(
        [do.fail("handshake", 1), do.ask_at_once("r", prompt(64))],
        shows="KVR022 of a request that does not wait",
        doc="One of two decode ranks cannot connect and fails the load: prefill still writes to it.",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=REQUEST,
    ),
    "nixl-push-begins-after-lease": push(
        [do.ask_at_once("r", prompt(300)), do.step(3), do.handshakes_take(45)],
        [do.step(5), do.step_alone("prefill", 45)],
        shows="KVR020",
        doc="Prefill takes long to connect to decode: it writes from blocks whose lease has expired.",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"kv_lease_duration": 3}),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-engines-wait-for-each-other": push(
        [do.router_takes(10), do.ask("r", prompt(64)), do.step(3), do.ask_at_once("s", prompt(64, seed=1))],
        shows="LAB003 is WAITING",
        doc="Prefill waits for decode's blocks for one request, and decode for prefill's blocks for another request.",
        options=Options(connector="nixl-push", num_blocks=7, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-heartbeat-refuses-peer": push(
        # The heartbeat runs while the request waits for blocks.
        [do.handshakes_take(3), do.on("decode", "take_blocks", 39), do.ask_at_once("r", prompt(64))],
        [do.step(6), do.on("decode", "free_blocks")],
        shows="LAB002 loaded up to 0 of 64",
        options=Options(
            connector="nixl-push",
            num_blocks=40,
            ranks=2,
            peer_ranks=1,
            extra={"kv_lease_duration": 3, "push_registration_timeout": 30.0},
        ),
    ),
    "nixl-push-never-arrives": push(
        [do.fail("setup"), do.ask("r", prompt(64))],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        doc="Prefill cannot write: decode waits for ever.",
        options=Options(connector="nixl-push", extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-notified-before-connected": push(
        [do.fail("handshake", 1), do.ask_at_once("before", prompt(64))],
        do.step(8),  # one rank has connected, the other one not
        [do.handshakes_take(10), do.ask_at_once("r", prompt(64, 1))],
        shows="KVR011 KeyError",
        doc="One of two decode ranks is notified of a write before it has connected: decode dies.",
        options=Options(connector="nixl-push", peer_ranks=2, kv_heads=2, extra={"push_registration_timeout": 5.0}),
    ),
    "nixl-push-outlives-lease": push(
        [do.ask("r", prompt(64), 2), do.step(5), do.step_alone("prefill", 35)],
        [do.ask("s", prompt(64, seed=1)), do.step_alone("prefill", 5)],
        shows="KVR021",
        doc="Decode hangs during a write: the lease ends, and another request writes to blocks that prefill sends.",
        options=Options(
            connector="nixl-push", num_blocks=8, delay=40, prefix_caching=False, extra={"kv_lease_duration": 3}
        ),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-prefill-generates-more": push(do.ask("r", prompt(64), 2, 5), shows="LAB001 holds other KV"),
    "nixl-push-promise-without-peer": push(malformed("no_host"), shows="KVR011 KeyError: 'remote_host'"),
    "nixl-push-registration-kept": push(
        # The router sends the request to both engines at once, and aborts it.
        [do.ask_at_once("r", prompt(300)), do.step(4), do.abort("r")],
        shows="LAB022 the prefill engine keeps it",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
        not_in_hooks=MEMORY,
    ),
    "nixl-push-second-decode-waits": push(
        [do.ask("r", prompt(64), 2), do.step(3), do.send_again("r")],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        # During a longer timeout the engines would make no steps, and after such a pause a load may come short.
        options=Options(connector="nixl-push", prefix_caching=False, extra={"push_registration_timeout": 0.5}),
    ),
    "nixl-push-thread-loses-notices": push(
        # One registration has more blocks than an earlier prefill request with the same id.
        [do.router_takes(100), do.ask("r", prompt(32)), do.step(3)],
        [do.ask_at_once("r", prompt(200)), do.ask_at_once("s", prompt(200, seed=1))],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        options=Options(connector="nixl-push", max_num_batched_tokens=64, extra={"push_registration_timeout": 5.0}),
    ),
}
