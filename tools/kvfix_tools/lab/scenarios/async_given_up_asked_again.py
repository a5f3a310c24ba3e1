"""A lookup is given up, and its request preempted and looked up again: what is fetched for it at last is kept for ever.

With asynchronous loading both lookups have the request's id. The answer to the first one is cleaned up while the second
is in flight, so a third is sent (lmcache_async_lookup_client.py 0.5.6:251 and 163).
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, preempt, prompt, run, settle, slow_lookups, step, stored_elsewhere, wait

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        slow_lookups(6),
        admit("r", prompt(300), max_tokens=5),
        step(),  # match(0): the lookup is sent
        wait(4),  # lookup_timeout_ms is 3,000
        step(),  # match(0): given up; computed
        preempt("r"),
        run(),
        settle(),
    ],
    rule="KVR009",
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.3.11"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.11"},  # in 0.3.10 a resumed request ends the engine before that
)
