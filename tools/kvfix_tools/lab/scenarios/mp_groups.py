"""LMCache's multi-process connector and models with several KV groups."""

from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import Options, Scenario, scenario
from kvfix_tools.lab.steps import prompt


def _window_freed(max_tokens: int, doc: str) -> Scenario:
    """Return a scenario of a store that is in flight when vLLM frees the blocks before the window."""
    return scenario(
        [do.admit("r", prompt(256), max_tokens=max_tokens), do.step()],
        # one step after "r" it takes the blocks before the window of "r", and writes to them
        do.admit("other", prompt(288, seed=1)),
        doc=doc,
        shows="LAB001 is stored under their key",
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=60, windows=(64,), max_num_batched_tokens=1024, delay=4),
    )


def _null_state(tokens: int, options: dict[str, Any], **more: Any) -> Scenario:
    """Return a scenario of a stored chunk without a state. A prompt of so many tokens hits the chunk."""
    return scenario(
        [do.store("first", prompt(110)), do.admit("short", prompt(tokens))],
        shows="LAB001 in KV group 1",
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        options=Options(connector="mp", max_num_batched_tokens=48, states=True, **options),
        **more,
    )


SCENARIOS = {
    "mp-failed-load-of-groups": scenario(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(200), max_tokens=2), do.step(2)],
        do.lose_loads(),  # the load was in flight
        [do.run(), do.expect_unharmed("r")],
        shows="KVR011 RuntimeError",
        wrong={"lmcache": ">=0.4.7,<0.5.6", "vllm": ">=0.32"},
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        options=Options(connector="mp", num_blocks=60, windows=(64,)),
    ),
    "mp-state-freed-while-stored": scenario(
        do.admit("r", prompt(256), max_tokens=2),
        doc="vLLM frees the block of a state during its store: the request writes a later state to the block.",
        shows="LAB001 is stored under their key",
        needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
        not_in_hooks="the block is used again after the next step, when the store may have ended",
        options=Options(
            connector="mp",
            num_blocks=24,
            chunk_size=16,
            max_num_batched_tokens=16,
            states=True,
            separate_object_groups=True,
            delay=20,
        ),
    ),
    # The step computes three blocks, and only the last one has a state. Without --separate-object-groups, the chunks of
    # the other blocks are stored too.
    "mp-state-kept-null": _null_state(40, {"chunk_size": 16}),
    # A chunk has two blocks. vLLM keeps a state at the end of each step, here after 48 and 96 tokens, in the third and
    # the sixth block. The second chunk has the third block, and the fourth, which is null.
    "mp-state-stored-null": _null_state(70, {"chunk_size": 32, "separate_object_groups": True}, hooks_rule="KVR014"),
    "mp-window-freed-at-end": _window_freed(
        1, "A request ends while its store is in flight: another request writes to blocks before the window."
    ),
    "mp-window-freed-while-stored": _window_freed(
        20, "The window moves on while a store is in flight: another request writes to the freed blocks."
    ),
    "mp-window-loaded-short": scenario(
        # For three MTP modules vLLM keeps two tokens before the window of 32. LMCache loads the last two blocks of "r".
        # vLLM also keeps the block before these, from token 80 on, and caches it. "other", without a hit in LMCache,
        # hits 112 tokens in vLLM and reads from token 81 on.
        [do.stored_elsewhere(prompt(128)), do.serve("r", prompt(160), max_tokens=2), do.lookups_fail(1)],
        do.admit("other", prompt(128) + prompt(40, seed=1), max_tokens=2),
        shows="LAB001 in KV group 1",
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        options=Options(connector="mp", num_blocks=60, windows=(32,), drafter="mtp", drafts=3, acceptance=50),
    ),
    "mp-window-reserves-too-little": scenario(
        # LMCache loads 256 of 320 tokens: 16 blocks of full attention, and one block of the window after 15 null
        # blocks. The rest needs 4 blocks in each KV group. vLLM reserves 4 blocks for "r" when it admits the load of
        # "other": 5 of 39 blocks stay free.
        [do.stored_elsewhere(prompt(256)), do.stored_elsewhere(prompt(256, seed=1))],
        [do.admit("r", prompt(320), max_tokens=2), do.admit("other", prompt(320, seed=1), max_tokens=2)],
        shows="LAB009 1 request is loaded and waits behind r, which needs 8 blocks; 5 are free",
        needs={"vllm": ">=0.32.0", "lmcache": ">=0.4.7"},
        options=Options(connector="mp", num_blocks=40, windows=(16,), max_num_batched_tokens=64),
    ),
    "mp-window-stored-late": scenario(
        # vLLM has 64 tokens, the cache 128. After the failure the tracker counts from 0, so each chunk is stored 64
        # tokens after it was computed.
        [do.serve("short", prompt(65)), do.stored_elsewhere(prompt(128))],
        [do.admit("r", prompt(400), max_tokens=2), do.step(2)],
        do.lose_loads(),  # the load was in flight
        doc="After a failed load LMCache stores each chunk too late: other requests have the window's blocks by then.",
        shows="LAB001 is stored under their key",
        needs={"lmcache": ">=0.5.6", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=32, windows=(64,), max_num_batched_tokens=16),
    ),
    "mp-window-stored-null": scenario(
        # After its prefix hit, the block list of `r` in the window's KV group begins with null block 0. A later,
        # shorter hit reads the chunk.
        [do.serve("first", prompt(256)), do.evict(4), do.store("r", prompt(512)), do.admit("short", prompt(100))],
        doc="LMCache stores null blocks of a window, because vLLM has a prefix that LMCache has evicted.",
        shows="LAB001 the step reads token",
        needs={"lmcache": ">=0.4.7", "vllm": ">=0.32"},
        hooks_rule="KVR014",
        options=Options(connector="mp", num_blocks=60, windows=(64,)),
    ),
}
