"""Two prompts given as embeddings of the same length share KV: their key is made of the zeros that stand for tokens."""

from kvfix_tools.lab.scenario import CONTENT, mp_scenarios
from kvfix_tools.lab.steps import admit, reset_prefix_cache, run, settle

SCENARIO = mp_scenarios(
    schedule=[
        admit("before", None, embeddings=(140, 0.0)),
        run(),
        reset_prefix_cache(),
        admit("r", None, max_tokens=2, embeddings=(140, 1.0)),
        run(),
        admit("next", [7] * 140),
        run(),
        settle(),
    ],
    rule="LAB001",
    not_in_hooks=CONTENT,
    wrong=">=0.4.5",
    max_num_batched_tokens=256,
)
