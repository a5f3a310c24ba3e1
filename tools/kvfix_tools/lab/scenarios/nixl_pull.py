"""vLLM's NixlConnector in pull mode, between a prefill and a decode engine."""

from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import MEMORY, Options, scenario
from kvfix_tools.lab.steps import malformed, prompt

pull = partial(scenario, options=Options(connector="nixl-pull"))

#: Other requests write to the blocks that prefill has freed. Then decode gets blocks for its loads.
OTHERS_WRITE = (
    do.on("prefill", "take_blocks", 60),
    do.step(),
    do.ask("s", prompt(32, seed=1)),
    do.step(),
    do.on("prefill", "free_blocks"),
    do.on("decode", "free_blocks"),
)

SCENARIOS = {
    "nixl-abort-names-no-peer": pull(
        [do.malform("no_request"), do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64)), do.step(3)],
        [do.abort("r"), do.step(), do.on("decode", "free_blocks")],
        shows="KVR011 KeyError: 'remote_request_id'",
    ),
    "nixl-decode-blocks-held": pull(
        # Decode computes the prompt itself.
        malformed("alone"),
        shows="LAB020 of the decode engine",
        options=Options(connector="nixl-pull", extra={"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 3}),
    ),
    # The parameters of the request ask for a rank that prefill does not have.
    "nixl-handshake-thread-dies": pull(malformed("more_ranks"), shows="LAB021 answers no handshake"),
    "nixl-lease-read-twice": pull(
        [do.ask("r", prompt(64), 2), do.step(2), do.on("decode", "keep_blocks", 0)],
        [do.send_again("r"), do.step(4)],
        *OTHERS_WRITE,
        shows="LAB001 holds other KV",
        doc="A router sends a request to decode again: the second request reads blocks that prefill has freed.",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-load-into-blocks-in-copy": pull(
        [do.on("decode", "keep_blocks", 5), do.ask_decode("a", prompt(64))],
        do.ask("r", prompt(64, seed=1)),  # its load gets the blocks of "a", which has ended
        [do.run(), do.on("decode", "free_blocks")],
        shows="LAB001 the OffloadingConnector stores other KV",
        doc="NIXL loads into blocks of an ended request that OffloadingConnector still copies.",
        wrong={"vllm": ">=0.32,<0.33"},
        options=Options(connector="nixl-offload", offloading="last", delay=3, prefix_caching=False),
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
        do.router_takes(1000),  # otherwise decode dies (KVF301)
        [do.ask("r", prompt(28)), do.step(3), do.on("prefill", "preempt", "r-00000001")],
        do.on("prefill", "keep_blocks", 0),  # the request does not resume before the answer
        [do.step(2), do.on("prefill", "free_blocks")],
        shows="KVR009 _reqs_to_process",
        options=Options(connector="nixl-pull", async_scheduling=True, block_size=4, max_num_batched_tokens=13),
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
        # Both engines hang while the request waits for blocks. Its lease expires, and another request writes to the
        # blocks.
        [do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64), 2), do.step(3)],
        [do.ask("q", prompt(16, seed=2)), do.time_passes(31.0), do.step_alone("prefill")],
        [do.ask("s", prompt(64, seed=1)), do.step_alone("prefill", 3), do.on("decode", "free_blocks")],
        shows="LAB001 holds other KV",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=20),
    ),
    "nixl-refused-peer-stays-refused": pull(
        [do.malform("other_tp_size"), do.ask("wrong", prompt(64)), do.run()],
        [do.faults_end(), do.ask("r", prompt(64, 1))],
        shows="LAB002 loaded up to 0 of 64",
    ),
    "nixl-second-load-never-starts": pull(
        [do.malform("decode_too"), do.ask("r", prompt(64), 5), do.step(5), do.on("decode", "preempt", "r-00000002")],
        shows="KVR010",
        doc="With `bidirectional_kv_xfer` a preempted request that loads blocks of the last turn waits for ever.",
        options=Options(
            connector="nixl-pull",
            prefix_caching=False,
            extra={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 8},
        ),
    ),
    "nixl-second-reader-aborted": pull(
        [do.on("decode", "keep_blocks", 0), do.ask("r", prompt(64), 2), do.step(3), do.send_again("r")],
        [do.step(), do.on("decode", "abort", "r-00000003"), do.step(3)],
        *OTHERS_WRITE,
        shows="LAB001 holds other KV",
        doc="A router sends a request again and aborts the second one: the first request reads freed blocks.",
        options=Options(connector="nixl-pull", prefix_caching=False, num_blocks=60),
    ),
    "nixl-turn-without-bidirectional": pull(
        malformed("decode_too"),
        shows="KVR010",
        doc="A request names blocks of the previous turn, but `bidirectional_kv_xfer` is off: it waits for ever.",
    ),
    "nixl-window-freed-at-end": pull(
        do.ask("r", prompt(63), 2),
        shows="LAB001 the step reads token 47 of 62 computed ones, its slot holds other KV in KV group 1",
        doc="Recomputing the last prompt token needs one token more than prefill keeps of the window.",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
    "nixl-window-freed-meanwhile": pull(
        do.ask("r", prompt(60), 2, prefill_tokens=4),
        shows="LAB001 the step reads token 44 of 59 computed ones, its slot holds other KV in KV group 1",
        doc="Prefill generates more than one token and frees blocks of the window that decode needs.",
        options=Options(connector="nixl-pull", windows=(16,)),
    ),
}
