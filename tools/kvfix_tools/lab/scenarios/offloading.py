"""Scenarios of vLLM's OffloadingConnector and SimpleCPUOffloadConnector, alone or with LMCache's connector."""

from functools import partial
from typing import Any

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import Options, Scenario, scenario
from kvfix_tools.lab.steps import Step, prompt

SIMPLE = partial(Options, connector="simple-offload", max_num_batched_tokens=512)
OFFLOADING = partial(Options, connector="offloading")
#: Scenarios of LMCache's connectors in a MultiConnector with an offloading connector.
beside = partial(scenario, needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"})
beside_0_32 = partial(beside, wrong={"vllm": ">=0.32,<0.33"})


def _failed_load(shows: str, *then: Step, doc: str = "", **options: Any) -> Scenario:
    """Return a scenario in which a load of LMCache fails, and an offloading connector stores the load's blocks."""
    return beside(
        [do.stored_elsewhere(prompt(256)), do.fail_load("r"), do.admit("r", prompt(300), max_tokens=4), *then],
        shows=shows,
        options=Options(offloading="last", max_num_batched_tokens=512, **options),
        doc=doc,
    )


SCENARIOS = {
    "failed-load-is-offloaded": _failed_load("LAB001 OffloadingConnector stores wrong KV"),
    "load-after-reset-asserts": beside_0_32(
        # Preempt the request between two steps, as reset_prefix_cache does.
        [do.admit("r", prompt(300), max_tokens=30), do.step(10)],  # its prompt is stored
        [do.preempt("r"), do.keep_blocks(10)],  # vLLM's prefix cache loses the end of the prompt
        do.free_blocks(),
        shows="KVR011 schedule: AssertionError",
        options=Options(connector="mp", offloading="first", delay=0, max_num_batched_tokens=512),
    ),
    "mp-load-into-blocks-in-copy": beside_0_32(
        [do.stored_elsewhere(prompt(256)), do.stored_elsewhere(prompt(256, seed=1)), do.keep_blocks(20)],
        do.admit("a", prompt(256)),  # LMCache has the prompt, so no store of LMCache holds the blocks
        do.admit("r", prompt(256, seed=1)),  # the load of "r" gets the blocks of "a", which has ended
        doc="A request has ended, but OffloadingConnector still copies its blocks: LMCache loads into these blocks.",
        shows="LAB001 OffloadingConnector stores wrong KV",
        options=Options(connector="mp", offloading="last", delay=3, max_num_batched_tokens=128, prefix_caching=False),
    ),
    "offload-copy-fails": scenario(
        [do.store("before", prompt(128)), do.fail_load("r"), do.admit("r", prompt(128), max_tokens=3)],
        shows="KVR011 wait_for_save: AssertionError",
        options=OFFLOADING(max_num_batched_tokens=512),
    ),
    "offload-promotions-go-round": scenario(
        do.budget(4),  # each chunk is in the file tier before the next chunk is computed
        [do.store("before", prompt(193)), do.admit("r", prompt(193), max_tokens=2)],
        shows="LAB003 is WAITING for ever",
        options=OFFLOADING(tier="fs", cpu_blocks=4, max_num_batched_tokens=32, extra={"blocks_per_chunk": 2}),
    ),
    "offload-reset-keeps-files": scenario(
        [do.serve("before", prompt(128)), do.new_weights(), do.admit("r", prompt(128), max_tokens=3)],
        shows="LAB001 its slot holds other KV",
        options=OFFLOADING(tier="fs", max_num_batched_tokens=512),
    ),
    "offload-window-chunk-stored-in-part": scenario(
        [do.serve("before", prompt(129)), do.evict(100)],
        # The prefix cache has 128 tokens. The window keeps blocks 5 to 7, so the chunk of blocks 4 and 5 lacks block 4.
        do.serve("hit", prompt(130)),
        do.serve("shorter", prompt(97)),  # the window has blocks 3 to 5, and blocks 4 and 5 count as stored
        [do.reset_prefix_cache(), do.admit("r", prompt(120), max_tokens=2)],
        shows="LAB001 in KV group 1",
        options=OFFLOADING(windows=(40,), num_blocks=128, max_num_batched_tokens=512, extra={"blocks_per_chunk": 2}),
    ),
    "session-offloads-other-blocks": beside_0_32(
        [do.admit("r", prompt(40), resumable=True), do.run(5), do.add_input("r", prompt(100, seed=1))],
        [do.run(5), do.end_input("r")],
        shows="LAB001 OffloadingConnector stores wrong KV",
        options=Options(offloading="last"),
    ),
    "simple-offload-copy-fails": scenario(
        [do.serve("before", prompt(128)), do.settle(), do.reset_prefix_cache()],
        [do.fail_load("r"), do.admit("r", prompt(128), max_tokens=3)],
        shows="LAB003",
        options=SIMPLE(),
        not_in_hooks="the load has started, and no hook shows that the load never ends",
    ),
    "simple-offload-never-rests": scenario(
        # The prompt is larger than the connector's CPU memory.
        do.admit("r", prompt(480)),
        shows="LAB029",
        options=SIMPLE(extra={"lazy_offload": True}, cpu_blocks=16, max_num_batched_tokens=32, num_blocks=34),
        not_in_hooks="no hook call is wrong: repeated stores of the same blocks violate no rule of the hooks",
    ),
    "simple-offload-store-asserts": _failed_load(
        "KVR011 update_from_output: AssertionError",
        do.admit("other", prompt(50, seed=1), max_tokens=8),  # while "other" runs, the engine makes steps
        doc="A load of LMCache fails, and EngineCore dies when SimpleCPUOffloadConnector's store of the blocks ends.",
        simple_offloading=True,
        kv_load_failure_policy="fail",
    ),
    "simple-offload-stores-failed-load": _failed_load(
        "LAB001 SimpleCPUOffloadConnector stores wrong KV",
        doc="A load of LMCache fails, and SimpleCPUOffloadConnector stores the blocks under valid keys.",
        simple_offloading=True,
    ),
    "simple-offload-window-not-loaded": scenario(
        [do.serve("before", prompt(145)), do.settle(), do.reset_prefix_cache()],
        [do.serve("loads", prompt(145)), do.admit("r", [*prompt(120), 5, 5, 5], max_tokens=2)],
        shows="LAB001 in KV group 1",
        options=SIMPLE(windows=(64,), drafter="mtp", drafts=5, acceptance=100, num_blocks=128),
    ),
}
