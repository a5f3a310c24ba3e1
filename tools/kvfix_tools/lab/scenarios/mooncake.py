"""vLLM's MooncakeConnector, between a prefill and a decode engine."""

from dataclasses import replace
from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import MEMORY, REQUEST, Options, scenario
from kvfix_tools.lab.steps import malformed, prompt

OPTIONS = Options(connector="mooncake", prefix_caching=False, num_blocks=60)
mooncake = partial(scenario, options=OPTIONS)

SCENARIOS = {
    "mooncake-abort-names-no-peer": mooncake(
        [do.malform("no_address"), do.on("decode", "take_blocks", 60), do.ask("r", prompt(64)), do.step(4)],
        [do.abort("r"), do.free_blocks(), do.ask("s", prompt(32, seed=1)), do.step(4)],
        shows="KVR011 KeyError",
    ),
    "mooncake-aborted-prefill-awaited": mooncake(
        [do.on("prefill", "budget", 16), do.ask_at_once("r", prompt(64), 5), do.step(3), do.abort("r")],
        shows="LAB026 has ended and is not sent",
    ),
    "mooncake-decode-reads-twice": mooncake(
        [do.ask("r", prompt(64), 2), do.step(6), do.send_again("r")],
        shows="LAB003 for ever",
        doc="A router sends a request to decode again while its KV is written: the second request waits for ever.",
        wrong={"vllm": ">=0.32,<0.33"},
        options=replace(OPTIONS, delay=5),
    ),
    "mooncake-load-ends-again": mooncake(
        # Prefill dies after it has written one of the two loads of a message.
        [do.budget(16), do.ask_at_once("r", prompt(16)), do.ask_at_once("s", prompt(200, seed=1))],
        [do.step(8), do.restart("prefill", 60), do.time_passes(541.0)],
        shows="KVR011",
        wrong={"vllm": ">=0.32,<0.33"},
        not_in_hooks=REQUEST,
    ),
    "mooncake-load-left-out": mooncake(
        [do.on("prefill", "budget", 8), do.on("decode", "take_blocks", 60), do.ask_at_once("r", prompt(64), 2)],
        [do.step(), do.on("decode", "abort", "r-00000002"), do.on("decode", "free_blocks")],
        [do.step(), do.send_again("r")],
        shows="LAB003 for ever",
        wrong={"vllm": ">=0.32,<0.33"},
    ),
    "mooncake-prefill-generates-more": mooncake(do.ask("r", prompt(60), 5, 20), shows="LAB001 holds other KV"),
    # The request does not name its prefill instance.
    "mooncake-promise-without-peer": mooncake(malformed("no_address"), shows="KVR010 never started"),
    "mooncake-second-reader-aborted": mooncake(
        [do.ask("r", prompt(64), 2), do.step(3), do.send_again("r"), do.on("decode", "abort", "r-00000003")],
        shows="KVR021",
        doc="Decode gets a request again, and the second one is aborted: prefill frees blocks that it still writes.",
        options=replace(OPTIONS, delay=5),
        not_in_hooks=REQUEST,
    ),
    "mooncake-stopped-prefill-unsent": mooncake(
        [do.ends_at_once("r", prompt(64)), do.ask("r", prompt(64), 5)], shows="LAB026 has ended and is not sent"
    ),
    "mooncake-transfer-kept-for-ever": mooncake(
        malformed("other_transfer"), shows="LAB022 the prefill engine keeps it", not_in_hooks=MEMORY
    ),
    "mooncake-write-outlives-load": mooncake(
        # Prefill reads decode's message when decode has already dropped the load.
        [do.ask("a", prompt(32, seed=2)), do.run(), do.on("prefill", "take_blocks", 60), do.handshakes_take(20)],
        [do.ask_at_once("r", prompt(64)), do.step(2), do.time_passes(541.0), do.step(2)],
        [do.on("prefill", "free_blocks"), do.ask_decode("s", prompt(200, seed=1), 40)],
        shows="LAB001",
        options=replace(OPTIONS, decode_blocks=18, kv_load_failure_policy="fail"),
    ),
}
