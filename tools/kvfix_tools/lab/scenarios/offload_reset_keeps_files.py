"""The weights change, and the OffloadingConnector loads KV of the old ones from the files of its tier.

Its CPU memory is emptied, and the connector reports that all is.
"""

from kvfix_tools.lab.scenario import CONTENT, Options, Scenario
from kvfix_tools.lab.steps import admit, new_weights, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("before", prompt(128)),
        run(),
        new_weights(),
        admit("r", prompt(128), max_tokens=3),
        run(),
        settle(),
    ],
    rule="LAB001",
    text="its slot holds other KV",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="offloading", tier="fs", max_num_batched_tokens=512),
    not_in_hooks=CONTENT,
)
