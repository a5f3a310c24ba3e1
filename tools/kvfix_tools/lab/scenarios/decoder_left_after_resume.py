"""A preempted request with a disagg_spec is resumed, and the decoder that it names stays in LMCache for ever.

`update_state_after_alloc` notes the decoder at each admission, and only a new request takes it out again.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, preempt, prompt, run, settle, step

DECODER = {"req_id": "r", "receiver_host": "decoder", "receiver_init_port": [1], "receiver_alloc_port": [2]}
ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": DECODER}}}

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=2, sampling=ASKS),
        step(),
        preempt("r"),
        run(),
        settle(),
    ],
    rule="KVR009",
    text="tmp_disagg_tracker still holds it",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(kv_role="kv_producer"),
)
