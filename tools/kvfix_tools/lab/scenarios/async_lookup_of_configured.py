"""With asynchronous loading a request that asks for `lmcache.skip_save` waits until its lookup is given up.

The worker cannot decode the message of the lookup, for the setting is no text, and never answers.
"""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_hit, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(256)),
        admit("r", prompt(300), sampling={"extra_args": {"kv_transfer_params": {"lmcache.skip_save": True}}}),
        run(),
        expect_hit("r"),
        settle(),
    ],
    rule="LAB006",
    wrong={"lmcache": ">=0.3.10"},
    options=Options(lmcache={"enable_async_loading": True}),
    needs={"lmcache": ">=0.3.10"},
    not_in_hooks=REQUEST,
)
