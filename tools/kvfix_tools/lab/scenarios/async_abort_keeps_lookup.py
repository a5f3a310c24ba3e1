"""Every client that goes away leaves its request's id in the asynchronous lookup client, for ever.

`request_finished` cancels the lookup of an aborted request, also if none is in flight: the id goes to
`aborted_lookups` and waits for an answer that was given long ago (lmcache_async_lookup_client.py 0.5.6:267-280).
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, admit, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=8),
        step(2),
        abort("r"),
        admit("next", prompt(300, seed=1)),
        run(),
        settle(),
    ],
    rule="KVR009",
    text="lookup_client.aborted_lookups",
    wrong={"lmcache": ">=0.3.10,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
