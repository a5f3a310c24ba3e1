"""Two adapters share KV through the multi-process server: the name of a LoRA is no part of the cache key."""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.steps import admit, prompt, run, settle

SCENARIO = mp_scenarios(
    schedule=[
        admit("before", prompt(140), lora="one"),
        run(),
        admit("r", prompt(140), max_tokens=2, lora="other"),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
