"""A session's turn ends while its next token is computed: the token is dropped, and the state has it.

Three stages, so three steps are in flight. The sixth token is computed before vLLM knows that the fifth was the last
one of the turn. The KV of attention is overwritten by that of the input; a state cannot go back.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(1), max_tokens=5, resumable=True),
        add_input("r", prompt(21), max_tokens=5),
        run(),
        end_input("r"),
        settle(),
    ],
    rule="LAB001",
    text="the step reads token 4 of 5 computed ones, its slot holds other KV in KV group 1",
    not_in_hooks=CONTENT,
    wrong={"vllm": ">=0.32"},
    needs={"lmcache": ">=0.5.4", "vllm": ">=0.32"},
    options=Options(connector="mp", ranks=3, pipeline=True, async_scheduling=True, states=True),
)
