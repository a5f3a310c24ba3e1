"""After a failed load the store runs ahead of the compute: KV that was never computed is stored under valid keys.

vLLM had 64 tokens, the cache 128; the load fails and vLLM goes on at 64. The tracker still counts the 128 of the hit
with what is scheduled, so it stores tokens 128 to 192 when 144 are computed. Every later hit on that chunk is wrong.
"""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import admit, lose_loads, prompt, run, settle, step, stored_elsewhere

SCENARIO = mp_scenarios(
    schedule=[
        admit("short", prompt(70)),
        run(),
        stored_elsewhere(prompt(128)),
        admit("r", prompt(300), max_tokens=2),
        step(2),
        lose_loads(),  # the load was in flight
        run(),
        settle(),
    ],
    rule="KVR008",
    wrong=">=0.4.5",
    max_num_batched_tokens=40,
)
