"""A lookup takes too long, and the next question about the request kills EngineCore: KeyError.

With asynchronous loading the client gives up after `lookup_timeout_ms`: it answers 0 and forgets when the lookup began;
the lookup still counts as in flight. If no blocks are free for the request in this step, vLLM asks again in the next,
and the client looks for the time that it has forgotten (lmcache_async_lookup_client.py 0.5.6:174, :187).
LMCache issue 3685; PR 3766 is open.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, free_blocks, keep_blocks, prompt, run, settle, slow_lookups, step, wait

SCENARIO = Scenario(
    schedule=[
        slow_lookups(99),
        keep_blocks(0),
        admit("r", prompt(300)),
        step(),  # match(0): the lookup is sent
        step(),  # match(0): not known yet
        wait(4),  # the worker is busy; lookup_timeout_ms is 3,000
        step(),  # match(0): given up, 0; no free blocks
        step(),  # match(0) again
        free_blocks(),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="schedule: KeyError: 'r'",
    wrong={"lmcache": ">=0.3.10"},
    options=Options(lmcache={"enable_async_loading": True}, max_num_batched_tokens=512),
    needs={"lmcache": ">=0.3.10"},
)
