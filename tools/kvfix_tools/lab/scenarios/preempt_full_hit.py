"""A preempted request all of whose tokens are in LMCache comes back with one token less than is asserted.

Another request whose prompt is this one with what was generated since has stored them. The last token has to be
computed again, so 255 of 256 are there.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, continued, preempt, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(continued(prompt(250), 6)),
        admit("r", prompt(250), max_tokens=16),
        step(6),
        preempt("r"),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="Preempted request r has num_computed_tokens 255 but",
    wrong={"lmcache": ">=0.3.10.post1,<0.4.3"},
    options=Options(chunk_size=256, max_num_batched_tokens=512),
)
