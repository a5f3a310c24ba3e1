"""A lookup that one of two ranks has not answered is given up; the request is preempted, and a worker dies of its load.

With asynchronous loading the first rank's answers to two lookups of the request count as one of each rank. What that
comes to is cleaned up, as of the first lookup, and a third is sent. The second rank's answer to the second lookup and
the first one's to the third begin the load before the second rank has fetched (lmcache_async_lookup_client.py
0.5.6:233-246).
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import (
    admit,
    lookups_fail,
    preempt,
    prompt,
    reset_prefix_cache,
    run,
    settle,
    slow_lookups,
    step,
    stored_elsewhere,
    wait,
)  # fmt: skip

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        lookups_fail(1),
        admit("r", prompt(300), max_tokens=5),
        step(),  # match(0): the lookup is sent
        wait(4),  # lookup_timeout_ms is 3,000
        step(),  # match(0): given up; computed
        preempt("r"),
        reset_prefix_cache(),
        step(),  # match(0): the lookup is sent, and answered by both ranks
        slow_lookups(3),  # of the second rank
        run(),
        settle(),
    ],
    rule="KVR011",
    text="is not done or not found",
    request="",
    wrong={"lmcache": ">=0.4.1"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512, ranks=2),
    # up to 0.3.15 the second rank does not clean up; several ranks were not tried with earlier releases of vLLM
    needs={"lmcache": ">=0.4.1", "vllm": ">=0.32"},
)
