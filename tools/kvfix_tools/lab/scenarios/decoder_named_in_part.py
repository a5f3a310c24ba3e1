"""A request names a decoder and leaves out its ports, and EngineCore dies when it has blocks for the request.

LMCache reads the keys of `disagg_spec` as if a proxy had made it; any client can send one (0.5.6
vllm_v1_adapter.py:1560-1574).
"""

from kvfix_tools.lab.scenario import Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

ASKS = {"extra_args": {"kv_transfer_params": {"disagg_spec": {"req_id": "r", "receiver_host": "decoder"}}}}

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), max_tokens=2, sampling=ASKS),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="KeyError: 'receiver_init_port'",
    wrong={"lmcache": ">=0.3.9"},
)
