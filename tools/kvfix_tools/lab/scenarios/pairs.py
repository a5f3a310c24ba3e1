"""Scenarios of NixlConnector (pull and push) and MooncakeConnector between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import CONTENT, MEMORY, REQUEST, Options, scenario
from kvfix_tools.lab.steps import malformed, prompt

PULL = partial(Options, connector="nixl-pull")
PUSH = partial(Options, connector="nixl-push")
OFFLOAD = partial(Options, connector="nixl-offload", prefix_caching=False)
MOONCAKE = partial(Options, connector="mooncake", prefix_caching=False, num_blocks=60)
pull, push, mooncake = (partial(scenario, options=made()) for made in (PULL, PUSH, MOONCAKE))
mooncake_0_32 = partial(mooncake, wrong={"vllm": ">=0.32,<0.33"})

#: With this setting of push mode, a registration of decode times out after 5 seconds.
SOON = {"push_registration_timeout": 5.0}
#: In these steps, other requests write to the blocks that prefill has freed. Then decode gets blocks for its loads.
OTHERS_WRITE = (
    [do.on("prefill", "take_blocks", 60), do.step(), do.ask("s", prompt(32, seed=1)), do.step()],
    [do.on("prefill", "free_blocks"), do.on("decode", "free_blocks")],
)

SCENARIOS = {
    "nixl-abort-names-no-peer": pull(
        [do.malform("no_request"), do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64)), do.step(3)],
        [do.abort("r"), do.step(), do.on("decode", "free_blocks")],
        shows="KVR011 KeyError: 'remote_request_id'",
    ),
    "nixl-decode-blocks-held": pull(
        # Decode computes the prompt itself, without a prefill engine.
        malformed("alone"),
        shows="LAB020 of the decode engine",
        options=PULL(extra={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3}),
    ),
    "nixl-handshake-thread-dies": pull(malformed("more_ranks"), shows="LAB021 answers no handshake"),
    "nixl-lease-read-twice": pull(
        [do.ask("r", prompt(64), 2), do.step(2), do.on("decode", "keep_blocks", 0), do.send_again("r"), do.step(4)],
        *OTHERS_WRITE,
        shows="LAB001 holds other KV",
        doc="The decode engine gets a request twice: the second request reads blocks that prefill has freed.",
        options=PULL(prefix_caching=False, num_blocks=60),
    ),
    "nixl-load-into-blocks-in-copy": pull(
        [do.on("decode", "keep_blocks", 5), do.ask_decode("a", prompt(64))],
        do.ask("r", prompt(64, seed=1)),  # the load of "r" gets the blocks of "a", which has ended
        [do.run(), do.on("decode", "free_blocks")],
        shows="LAB001 OffloadingConnector stores wrong KV",
        doc="A request has ended, but OffloadingConnector still copies its blocks: NIXL loads into these blocks.",
        wrong={"vllm": ">=0.32,<0.33"},
        options=OFFLOAD(offloading="last", delay=3),
    ),
    "nixl-malformed-handshake-fails": pull(
        [do.malform("flat_blocks"), do.fail("handshake"), do.ask("r", prompt(64))],
        shows="LAB003 WAITING_FOR_REMOTE_KVS for ever",
        doc="A request names its blocks in a flat list, and the handshake fails: the request waits for ever.",
    ),
    "nixl-malformed-read-raises": pull(
        malformed("odd_blocks"),
        shows="KVR011 start_load_kv: ValueError",
        doc="The parameters of a request name a block by a value that is not a number: the decode worker dies.",
    ),
    "nixl-odd-engine-id": pull(malformed("odd_engine"), shows="KVR011 add_request: TypeError"),
    "nixl-prefill-generates-more": pull(
        do.ask("r", prompt(64), 2, 5),
        shows="LAB001 holds other KV",
        doc="Prefill generates tokens beyond the last block of the prompt: decode loads all KV shifted by a block.",
    ),
    "nixl-prefill-has-fewer-blocks": pull(
        malformed("fewer_blocks"),
        shows="KVR011 start_load_kv: AssertionError",
        doc="Prefill names fewer blocks than the prompt has: the decode engine dies.",
    ),
    "nixl-prefill-preempted-at-its-end": pull(
        do.router_takes(1000),  # without this delay decode dies (KVF301)
        [do.ask("r", prompt(28)), do.step(3), do.on("prefill", "preempt", "r-00000001")],
        do.on("prefill", "keep_blocks", 0),  # "r" resumes only after decode's message
        [do.step(2), do.on("prefill", "free_blocks")],
        shows="KVR009 _reqs_to_process",
        options=PULL(async_scheduling=True, block_size=4, max_num_batched_tokens=13),
        not_in_hooks=MEMORY,
    ),
    "nixl-promise-without-blocks": pull(
        malformed("no_blocks"),
        shows="KVR011 schedule: AssertionError",
        doc="A request asks for a remote prefill and names no blocks: EngineCore of decode dies.",
    ),
    "nixl-promise-without-host": pull(
        malformed("no_host"),
        shows="KVR010",
        doc="A request does not name the host of its prefill engine: it waits for ever.",
    ),
    "nixl-read-outlives-lease": pull(
        # Both engines hang while the request waits. The lease expires, and another request writes to the blocks.
        [do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64), 2), do.step(3)],
        [do.ask("q", prompt(16, seed=2)), do.time_passes(31.0), do.step_alone("prefill")],
        [do.ask("s", prompt(64, seed=1)), do.step_alone("prefill", 3), do.on("decode", "free_blocks")],
        shows="LAB001 holds other KV",
        options=PULL(prefix_caching=False, num_blocks=20),
    ),
    "nixl-refused-peer-stays-refused": pull(
        [do.malform("other_tp_size"), do.ask("wrong", prompt(64)), do.run()],
        [do.faults_end(), do.ask("r", prompt(64, 1))],
        shows="LAB002 loaded up to token 0, but promised up to 64",
    ),
    "nixl-second-load-never-starts": pull(
        [do.malform("decode_too"), do.ask("r", prompt(64), 5), do.step(5), do.on("decode", "preempt", "r-00000002")],
        shows="KVR010",
        doc="With `bidirectional_kv_xfer`, a request loads the previous turn, is preempted and waits for ever.",
        options=PULL(prefix_caching=False, extra={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8}),
    ),
    "nixl-second-reader-aborted": pull(
        [do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64), 2), do.step(3), do.send_again("r")],
        [do.step(), do.on("decode", "abort", "r-00000003"), do.step(3)],
        *OTHERS_WRITE,
        shows="LAB001 holds other KV",
        doc="A router sends a request again and aborts the second one: the first request reads freed blocks.",
        options=PULL(prefix_caching=False, num_blocks=60),
    ),
    "nixl-turn-without-bidirectional": pull(
        malformed("decode_too"),
        shows="KVR010",
        doc="A request names blocks of the previous turn, but `bidirectional_kv_xfer` is off: it waits for ever.",
    ),
    "nixl-window-freed-at-end": pull(
        do.ask("r", prompt(63), 2),
        shows="LAB001 the step reads token 47 of 62 computed ones, its slot holds other KV in KV group 1",
        doc="Decode computes the last prompt token again. The token needs a block that prefill has freed.",
        options=PULL(windows=(16,)),
    ),
    "nixl-window-freed-meanwhile": pull(
        do.ask("r", prompt(60), 2, prefill_tokens=4),
        shows="LAB001 the step reads token 44 of 59 computed ones, its slot holds other KV in KV group 1",
        doc="Prefill generates more than one token, and frees window blocks that decode still needs.",
        options=PULL(windows=(16,)),
    ),
    "nixl-push-abort-keeps-blocks": push(
        [do.fail("setup"), do.ask("r", prompt(64)), do.step(6), do.abort("r")],
        shows="LAB020 of the decode engine",
        doc="Prefill cannot write, and the request is aborted: decode keeps its blocks for ever.",
        options=PUSH(extra=SOON),
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
        doc="One of two decode ranks cannot connect, and its load fails. Prefill still writes to both ranks.",
        options=PUSH(peer_ranks=2, kv_heads=2, extra=SOON),
        not_in_hooks=REQUEST,
    ),
    "nixl-push-begins-after-lease": push(
        [do.ask_at_once("r", prompt(300)), do.step(3), do.handshakes_take(45)],
        [do.step(5), do.step_alone("prefill", 45)],
        shows="KVR020",
        doc="Prefill takes long to connect to decode: it writes from blocks whose lease has expired.",
        options=PUSH(max_num_batched_tokens=64, extra={"kv_lease_duration": 3}),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-engines-wait-for-each-other": push(
        [do.router_takes(10), do.ask("r", prompt(64)), do.step(3), do.ask_at_once("s", prompt(64, seed=1))],
        shows="LAB003 is WAITING",
        doc="Prefill waits until decode has blocks for one request. Decode waits until prefill has blocks for another.",
        options=PUSH(num_blocks=7, extra=SOON),
    ),
    "nixl-push-heartbeat-refuses-peer": push(
        # The heartbeat runs while the request waits for blocks.
        [do.handshakes_take(3), do.on("decode", "take_blocks", 39), do.ask_at_once("r", prompt(64))],
        [do.step(6), do.on("decode", "free_blocks")],
        shows="LAB002 loaded up to token 0, but promised up to 64",
        options=PUSH(
            num_blocks=40, ranks=2, peer_ranks=1, extra={"kv_lease_duration": 3, "push_registration_timeout": 30.0}
        ),
    ),
    "nixl-push-never-arrives": push(
        [do.fail("setup"), do.ask("r", prompt(64))],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        doc="Prefill cannot write: decode waits for ever.",
        options=PUSH(extra=SOON),
    ),
    "nixl-push-notified-before-connected": push(
        [do.fail("handshake", 1), do.ask_at_once("before", prompt(64))],
        do.step(8),  # one rank has connected, and the other rank has not
        [do.handshakes_take(10), do.ask_at_once("r", prompt(64, 1))],
        shows="KVR011 KeyError",
        doc="One of two decode ranks is notified of a write before it has connected: decode dies.",
        options=PUSH(peer_ranks=2, kv_heads=2, extra=SOON),
    ),
    "nixl-push-outlives-lease": push(
        [do.ask("r", prompt(64), 2), do.step(5), do.step_alone("prefill", 35)],
        [do.ask("s", prompt(64, seed=1)), do.step_alone("prefill", 5)],
        shows="KVR021",
        doc="Decode hangs during a write: the lease ends, and another request writes to blocks that prefill sends.",
        options=PUSH(num_blocks=8, delay=40, prefix_caching=False, extra={"kv_lease_duration": 3}),
        not_in_hooks=CONTENT,
    ),
    "nixl-push-prefill-generates-more": push(do.ask("r", prompt(64), 2, 5), shows="LAB001 holds other KV"),
    "nixl-push-promise-without-peer": push(malformed("no_host"), shows="KVR011 KeyError: 'remote_host'"),
    "nixl-push-registration-kept": push(
        [do.ask_at_once("r", prompt(300)), do.step(4), do.abort("r")],
        shows="LAB022 the prefill engine keeps state",
        options=PUSH(max_num_batched_tokens=64, extra=SOON),
        not_in_hooks=MEMORY,
    ),
    "nixl-push-second-decode-waits": push(
        [do.ask("r", prompt(64), 2), do.step(3), do.send_again("r")],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        # With a longer timeout, `Pair.run` would call `time_passes`, and the lab would accept loads of too few tokens.
        options=PUSH(prefix_caching=False, extra={"push_registration_timeout": 0.5}),
    ),
    "nixl-push-thread-loses-notices": push(
        # Two requests have the id "r". Decode registers more blocks for the second "r" than prefill has for the first.
        [do.router_takes(100), do.ask("r", prompt(32)), do.step(3)],
        [do.ask_at_once("r", prompt(200)), do.ask_at_once("s", prompt(200, seed=1))],
        shows="LAB003 WAITING_FOR_REMOTE_KVS",
        options=PUSH(max_num_batched_tokens=64, extra=SOON),
    ),
    # ------------------------------------------------------------------ Mooncake
    "mooncake-abort-names-no-peer": mooncake(
        [do.malform("no_address"), do.on("decode", "take_blocks", 60), do.ask("r", prompt(64)), do.step(4)],
        [do.abort("r"), do.free_blocks(), do.ask("s", prompt(32, seed=1)), do.step(4)],
        shows="KVR011 KeyError",
    ),
    "mooncake-aborted-prefill-awaited": mooncake(
        [do.on("prefill", "budget", 16), do.ask_at_once("r", prompt(64), 5), do.step(3), do.abort("r")],
        shows="LAB026 that prefill will not send",
    ),
    "mooncake-decode-reads-twice": mooncake_0_32(
        [do.ask("r", prompt(64), 2), do.step(6), do.send_again("r")],
        shows="LAB003 for ever",
        doc="The decode engine gets a request twice while prefill writes KV: the second request waits for ever.",
        options=MOONCAKE(delay=5),
    ),
    "mooncake-load-ends-again": mooncake_0_32(
        # One message of decode asks for the loads of both requests. Prefill dies after the write for one request.
        [do.budget(16), do.ask_at_once("r", prompt(16)), do.ask_at_once("s", prompt(200, seed=1))],
        [do.step(8), do.restart("prefill", 60), do.time_passes(541.0)],
        shows="KVR011",
        not_in_hooks=REQUEST,
    ),
    "mooncake-load-left-out": mooncake_0_32(
        [do.on("prefill", "budget", 8), do.on("decode", "take_blocks", 60), do.ask_at_once("r", prompt(64), 2)],
        [do.step(), do.on("decode", "abort", "r-00000002"), do.on("decode", "free_blocks")],
        [do.step(), do.send_again("r")],
        shows="LAB003 for ever",
    ),
    "mooncake-prefill-generates-more": mooncake(do.ask("r", prompt(60), 5, 20), shows="LAB001 holds other KV"),
    "mooncake-promise-without-peer": mooncake(malformed("no_address"), shows="KVR010 never started"),
    "mooncake-second-reader-aborted": mooncake(
        [do.ask("r", prompt(64), 2), do.step(3), do.send_again("r"), do.on("decode", "abort", "r-00000003")],
        shows="KVR021",
        doc="Decode gets a request twice, and the second one is aborted: prefill frees blocks that it still sends.",
        options=MOONCAKE(delay=5),
        not_in_hooks=REQUEST,
    ),
    "mooncake-stopped-prefill-unsent": mooncake(
        [do.ends_at_once("r", prompt(64)), do.ask("r", prompt(64), 5)], shows="LAB026 that prefill will not send"
    ),
    "mooncake-transfer-kept-for-ever": mooncake(
        malformed("other_transfer"), shows="LAB022 the prefill engine keeps state", not_in_hooks=MEMORY
    ),
    "mooncake-write-outlives-load": mooncake(
        # Prefill reads decode's message only after decode has dropped the load.
        [do.ask("a", prompt(32, seed=2)), do.run(), do.on("prefill", "take_blocks", 60), do.handshakes_take(20)],
        [do.ask_at_once("r", prompt(64)), do.step(2), do.time_passes(541.0), do.step(2)],
        [do.on("prefill", "free_blocks"), do.ask_decode("s", prompt(200, seed=1), 40)],
        shows="LAB001",
        options=MOONCAKE(decode_blocks=18, kv_load_failure_policy="fail"),
    ),
}
