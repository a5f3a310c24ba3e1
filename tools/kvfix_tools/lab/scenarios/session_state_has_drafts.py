"""A session's turn ends within accepted drafts: the tokens after its end are dropped, and the state has them.

Of four tokens that the last step has computed the turn's end leaves two. The KV of attention is overwritten by that of
the input; a state cannot go back.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(20), max_tokens=7, resumable=True),
        add_input("r", prompt(21), max_tokens=5),
        run(),
        end_input("r"),
        settle(),
    ],
    rule="LAB001",
    text="the step reads token",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.32"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    options=Options(connector="mp", states=True, drafter="mtp", drafts=3, acceptance=100),
)
