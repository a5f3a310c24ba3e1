"""The locks of a request with a `cache_salt` are given back under another key, and held until they time out."""

from kvfix_tools.lab.scenario import SERVER, mp_scenarios
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = mp_scenarios(
    schedule=[
        admit("before", prompt(140), cache_salt="tenant"),
        run(),
        admit("r", prompt(140), cache_salt="tenant"),  # vLLM has all that is found
        run(),
        settle(),
    ],
    rule="KVR009",
    not_in_hooks=SERVER,
    text="read locks of the server",
    wrong=">=0.4.5,<0.5.1",
    max_num_batched_tokens=256,
)
