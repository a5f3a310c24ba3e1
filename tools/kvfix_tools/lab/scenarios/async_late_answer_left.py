"""A lookup is given up, the request is served without it and ends; then the answer comes: it is kept, chunks and all.

With asynchronous loading the client gives up after `lookup_timeout_ms`, the worker goes on. The lookup is not
cancelled (it is since 0.4.1): the late answer is kept for a request that has ended, and so is what was fetched.
"""

from kvfix_tools.lab.scenario import WORKER, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle, slow_lookups, step, stored_elsewhere, wait

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        slow_lookups(3),
        admit("r", prompt(300)),
        step(),  # match(0): the lookup is sent
        wait(4),  # lookup_timeout_ms is 3,000
        step(),  # match(0): given up; computed, and it ends
        slow_lookups(0),
        admit("next 1", prompt(300, seed=1)),  # the answer comes; other lookups would clean up
        run(),
        admit("next 2", prompt(300, seed=2)),
        run(),
        settle(),
    ],
    rule="KVR009",
    not_in_hooks=WORKER,
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.3.10,<0.4.1"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
