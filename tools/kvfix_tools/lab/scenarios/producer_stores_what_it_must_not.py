"""A kv_producer stores the prompt of a request that asks for `lmcache.skip_save`.

Each request that was looked up has metadata for the worker, and a kv_producer stores whatever has.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
        run(),
        settle(),
    ],
    rule="LAB010",
    text="and it asks for lmcache.skip_save",
    wrong={"lmcache": ">=0.3.12"},  # before, another bug ends it
    options=Options(kv_role="kv_producer"),
    not_in_hooks=REQUEST,
)
