"""LMCache's multi-process connector without vLLM's copy: failures of its server, and scenarios of some releases."""

from dataclasses import replace
from functools import partial

from kvfix_tools.lab import steps as do
from kvfix_tools.lab.scenario import SERVER, Options, scenario
from kvfix_tools.lab.steps import prompt

mp = partial(scenario, options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256))

SCENARIOS = {
    "mp-heartbeat-never-starts": mp(
        [do.stored_elsewhere(prompt(128)), do.admit("before", prompt(140, seed=1)), do.step()],
        [do.lookup_times_out(), do.run()],
        do.step(),  # a heartbeat would have found the server before this step
        [do.serve("r", prompt(140)), do.settle(), do.expect_hit("r")],
        shows="LAB006",
        not_in_hooks=SERVER,
        wrong={"lmcache": ">=0.5.0,<0.5.6"},
    ),
    "mp-idle-worker-forgotten": mp(
        [do.stored_elsewhere(prompt(128)), do.hour_of_silence(), do.admit("r", prompt(200))],
        shows="LAB002",
        wrong={"lmcache": ">=0.5.0"},
    ),
    "mp-load-after-given-up": mp(
        [do.stored_elsewhere(prompt(128)), do.admit("r", prompt(140))],
        do.step(5),  # looked up, found, granted; the load is in flight
        do.server_stops(),
        do.step(2),  # the worker reports that the load has failed; vLLM frees the blocks
        do.admit("other", prompt(200, seed=1), max_tokens=10),
        [do.admit("another", prompt(200, seed=2), max_tokens=10), do.step(2), do.server_goes_on()],
        doc="The worker drops the load of a slow server, and the server writes into blocks of other requests.",
        shows="LAB001 computed ones, its slot holds other KV",
        needs={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=28, max_num_batched_tokens=1024, delay=3),
    ),
    "mp-load-not-granted": mp(
        # With `prompt_logprobs` vLLM reads no cache. It still asks the connector, and tells it that nothing is granted.
        do.stored_elsewhere(prompt(128)),
        do.admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
        shows="KVR004",
        # before vLLM 0.31 this request takes the promise of the connector
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.4.5,<0.5.5"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256, delay=0),
    ),
    "mp-preempted-while-silent": mp(
        # Other requests write to the blocks, and the server stores their KV under the keys of the request.
        do.admit("r", prompt(200), max_tokens=20),
        do.step(5),  # computed and handed over
        do.server_stops(),
        do.step(),  # the worker believes that the server is dead
        do.preempt("r"),
        do.keep_blocks(0),  # other requests take its blocks and write to them
        [do.step(2), do.server_goes_on(), do.step(4), do.free_blocks()],
        doc="A slow server misses a heartbeat: the worker does not wait for the store of a preempted request.",
        shows="LAB001 is stored under their key",
        needs={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=9),
    ),
    "mp-reset-keeps-what-is-in-flight": mp(
        do.admit("r", prompt(200), max_tokens=4),
        do.step(3),  # the lookup is answered, and the prompt is computed and stored
        do.new_weights(),
        shows="LAB001 other KV than that of tokens 0 on is stored under their key",
        needs={"lmcache": ">=0.5.6", "vllm": ">=0.22.0"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256, delay=2),
    ),
    "mp-resume-load-circle": mp(
        [do.admit("r", prompt(140), max_tokens=8), do.step(6), do.preempt("r")],
        do.keep_blocks(0),  # vLLM's prefix cache has no block of the request when it resumes
        [do.step(), do.free_blocks()],
        *[do.fail_load("r"), do.step()] * 40,
        do.expect_all_ended(),
        doc="The load of a preempted request fails again and again, and the request never runs.",
        shows="LAB003",
        wrong={"lmcache": ">=0.5.6"},
    ),
    "mp-store-after-given-up": mp(
        do.admit("r", prompt(200)),
        do.step(6),  # computed, handed over and ended; vLLM keeps its blocks
        do.server_stops(),
        do.step(2),  # the worker reports that the store is done; vLLM frees the blocks
        do.keep_blocks(0),  # other requests take these blocks and write to them
        [do.step(), do.server_goes_on(), do.step(4), do.free_blocks()],
        doc="A slow server misses a heartbeat: the worker drops its store, and the server stores KV of other requests.",
        shows="LAB001 is stored under their key",
        needs={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=5),
    ),
}
SCENARIOS["mp-silent-server-given-up"] = replace(
    SCENARIOS["mp-load-after-given-up"],
    doc="",  # the title of KVF904
    wrong={"vllm": ">=0.22.0", "lmcache": ">=0.4.5,<0.5"},
    needs={"lmcache": "<0.5"},
)
