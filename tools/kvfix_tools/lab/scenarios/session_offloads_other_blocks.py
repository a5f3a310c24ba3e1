"""A session gets more input, and the OffloadingConnector stores its first blocks under the keys of later ones.

With its input a session is scheduled as a new request, with all its blocks, which are added to those known.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import add_input, admit, end_input, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(40), resumable=True),
        run(5),
        add_input("r", prompt(100, seed=1)),
        run(5),
        end_input("r"),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="the OffloadingConnector stores other KV",
    wrong={"vllm": ">=0.32,<0.33"},
    options=Options(offloading="last"),
    needs={"vllm": ">=0.32", "lmcache": ">=0.5.6"},
    not_in_hooks=CONTENT,
)
