"""A request that is to return its first token is aborted before it has one, and EngineCore dies.

LMCache's hook for an ended request takes the first generated token. A proxy asks for it of an instance for prefill.
"""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import abort, admit, prompt, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"ret_first_tok": True}}}),
        step(),  # 128 of 300 tokens
        abort("r"),
        settle(),
    ],
    rule="KVR011",
    text="IndexError: list index out of range",
    # in the others an abort raises before (abort-engine-assert)
    wrong={"lmcache": ">=0.3.11,!=0.4.5,!=0.4.6,!=0.4.7,!=0.5.0"},
    options=Options(kv_role="kv_producer"),
)
