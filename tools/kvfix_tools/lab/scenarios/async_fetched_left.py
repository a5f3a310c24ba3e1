"""Chunks fetched ahead for a request that then loads nothing are never let go: the cache fills up with them.

vLLM has as much of the prompt as LMCache, so nothing is promised and nothing loaded; the fetched chunks keep their
references and pins (LMCache PR 2559). 0.3.10 dies before that, of what mismatch-in-tokens-to-load shows.
"""

from kvfix_tools.lab.scenario import WORKER, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("first", prompt(300)),
        run(),
        admit("r", prompt(300)),
        run(),
        settle(),
    ],
    rule="KVR009",
    not_in_hooks=WORKER,
    text="fetched chunks of the worker",
    wrong={"lmcache": ">=0.3.10.post1,<0.4.1"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
