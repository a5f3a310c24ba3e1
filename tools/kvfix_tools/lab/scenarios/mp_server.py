"""LMCache's multi-process connector alone: failures of its server, and what only some releases play."""

from dataclasses import replace

from kvfix_tools.lab.scenario import SERVER, Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    expect_all_ended,
    expect_hit,
    fail_load,
    free_blocks,
    hour_of_silence,
    keep_blocks,
    lookup_times_out,
    new_weights,
    preempt,
    prompt,
    run,
    server_goes_on,
    server_stops,
    settle,
    step,
    stored_elsewhere,
)

SCENARIOS = {
    "mp-heartbeat-never-starts": Scenario(
        doc="After one lookup that timed out the scheduler never asks the server again: its heartbeat never starts.",
        schedule=[
            stored_elsewhere(prompt(128)),
            admit("before", prompt(140, seed=1)),
            step(),
            lookup_times_out(),
            run(),
            step(),  # a heartbeat would have found the server by now
            admit("r", prompt(140)),
            run(),
            settle(),
            expect_hit("r"),
        ],
        rule="LAB006",
        not_in_hooks=SERVER,
        wrong={"lmcache": ">=0.5.0,<0.5.6"},
        needs={"lmcache": ">=0.4.5"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256),
    ),
    "mp-idle-worker-forgotten": Scenario(
        doc="A worker that has had no request for an hour is forgotten by the server, and what it then loads fails.",
        schedule=[stored_elsewhere(prompt(128)), hour_of_silence(), admit("r", prompt(200)), run(60), settle()],
        rule="LAB002",
        wrong={"lmcache": ">=0.5.0"},
        needs={"lmcache": ">=0.4.5"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256),
    ),
    "mp-load-after-given-up": Scenario(
        doc="""A slow server misses a heartbeat: the worker gives up its load, and the server does it later, into
        others' blocks.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            admit("r", prompt(140)),
            step(5),  # looked up, found, granted; the load is in flight
            server_stops(),
            step(2),  # the worker reports that the load has failed; vLLM frees the blocks
            admit("other", prompt(200, seed=1), max_tokens=10),
            admit("another", prompt(200, seed=2), max_tokens=10),
            step(2),
            server_goes_on(),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="computed ones, its slot holds other KV",
        wrong={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=28, max_num_batched_tokens=1024, delay=3),
    ),
    "mp-load-not-granted": Scenario(
        doc="""A request that vLLM computes itself is loaded all the same, into blocks in use; EngineCore dies when that
        is done.

        With `prompt_logprobs` vLLM reads no cache, its own or another. The connector is asked all the same, and
        told that nothing is granted.""",
        schedule=[
            stored_elsewhere(prompt(128)),
            admit("r", prompt(200), max_tokens=4, sampling={"prompt_logprobs": 1}),
            run(),
            settle(),
        ],
        rule="KVR004",
        # before vLLM 0.31 such a request takes what the connector has
        wrong={"vllm": ">=0.31.0", "lmcache": ">=0.4.5,<0.5.5"},
        needs={"lmcache": ">=0.4.5"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256, delay=0),
    ),
    "mp-preempted-while-silent": Scenario(
        doc="""A slow server misses a heartbeat while a store is in flight, and its request is preempted: the worker
        does not wait.

        Others write to the blocks, and the server stores that under the request's keys when it goes on.""",
        schedule=[
            admit("r", prompt(200), max_tokens=20),
            step(5),  # computed and handed over
            server_stops(),
            step(),  # the worker takes the server for dead
            preempt("r"),
            keep_blocks(0),  # others take its blocks and write to them
            step(2),
            server_goes_on(),
            step(4),
            free_blocks(),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="is stored under their key",
        wrong={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=9),
    ),
    "mp-reset-keeps-what-is-in-flight": Scenario(
        doc="""New weights while a store is in flight: it is done after the reset, and KV of the old weights is under
        valid keys.

        `reset_cache` (lmcache_mp_connector.py 0.5.6:1201) asks the server to clear what has no lock and answers
        True. With the fix the answer is False: the caller knows that the cache may have old KV.""",
        schedule=[
            admit("r", prompt(200), max_tokens=4),
            step(3),  # its lookup is answered, and it is computed and stored
            new_weights(),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="other KV than that of tokens 0 on is stored under their key",
        wrong={"lmcache": ">=0.5.6", "vllm": ">=0.22.0"},
        needs={"lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256, delay=2),
    ),
    "mp-resume-load-circle": Scenario(
        doc="""A preempted request is resumed with a load that fails: it is looked up and loaded in a circle, and
        never runs.""",
        schedule=[
            admit("r", prompt(140), max_tokens=8),
            step(6),
            preempt("r"),
            keep_blocks(0),  # vLLM's own prefix cache has none of it when it comes back
            step(),
            free_blocks(),
            *[fail_load("r"), step()] * 40,
            expect_all_ended(),
        ],
        rule="LAB003",
        wrong={"lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.4.5"},
        options=Options(connector="mp", num_blocks=60, max_num_batched_tokens=256),
    ),
    "mp-store-after-given-up": Scenario(
        doc="""A slow server misses a heartbeat: the worker gives up its store, and the server does it later, of
        others' KV.""",
        schedule=[
            admit("r", prompt(200)),
            step(6),  # computed, handed over and ended; vLLM keeps its blocks
            server_stops(),
            step(2),  # the worker reports that the store is done; vLLM frees the blocks
            keep_blocks(0),  # others take them and write to them
            step(),
            server_goes_on(),
            step(4),
            free_blocks(),
            run(),
            settle(),
        ],
        rule="LAB001",
        text="is stored under their key",
        wrong={"vllm": ">=0.22.0", "lmcache": ">=0.5.6"},
        needs={"lmcache": ">=0.5.6"},
        options=Options(connector="mp", num_blocks=50, max_num_batched_tokens=1024, delay=5),
    ),
}
SCENARIOS["mp-silent-server-given-up"] = replace(
    SCENARIOS["mp-load-after-given-up"],
    doc="A slow server misses a heartbeat: mp-load-after-given-up in LMCache 0.4, where the worker cannot know better.",
    wrong={"vllm": ">=0.22.0", "lmcache": ">=0.4.5,<0.5"},
    needs={"lmcache": ">=0.4.5,<0.5"},
)
