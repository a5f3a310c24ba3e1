"""A session's turn ends within accepted drafts, and the first tokens of its next input are never computed.

Of four tokens that a step has brought, the session may have one. vLLM drops the others, but counts their KV as
computed: two tokens of the input get the slots, and the KV, of tokens that are gone.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, prompt, run, settle, step

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(20), max_tokens=2, resumable=True),
        step(2),
        add_input("r", prompt(60, seed=1), max_tokens=4),
        run(),
        end_input("r"),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    text="the step reads token 22 of 24 computed ones",
    wrong={"vllm": ">=0.32,<0.33"},
    needs={"vllm": ">=0.32"},
    options=Options(max_num_batched_tokens=128, drafter="eagle", drafts=3, acceptance=100),
)
