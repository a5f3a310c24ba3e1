"""New weights, and vLLM answers that the connector's cache was reset: the server keeps all, and old KV is hit.

The multi-process connector has no `reset_cache` before LMCache 0.5.6; vLLM's copy has none. vLLM takes the None of its
base class for success (scheduler.py 0.32.0:2898).
"""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.scenarios.reset_keeps_external_cache import SCHEDULE

SCENARIO = mp_scenarios(
    schedule=SCHEDULE,
    rule="LAB001",
    text="the step reads token 0 of",
    not_in_hooks=CONTENT,
    wrong=">=0.4.5,<0.5.6",
)
