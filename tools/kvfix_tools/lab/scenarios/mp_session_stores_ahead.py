"""A session that gets input counts rejected drafts as computed: a chunk is stored before it is computed.

Nine steps have had 63 drafts rejected. Of the input's 200 tokens the next step computes 64, up to token 113. The
tracker counts 176, and has tokens 64 to 128 stored.
"""

from kvfix_tools.lab.scenario import mp_scenarios
from kvfix_tools.lab.steps import add_input, admit, end_input, prompt, run, settle, step

SCENARIO = mp_scenarios(
    schedule=[
        admit("r", prompt(40), max_tokens=10, resumable=True),
        run(),
        add_input("r", prompt(200, seed=1)),
        step(3),
        run(),
        end_input("r"),
        settle(),
    ],
    rule="LAB001",
    hooks_rule="KVR008",
    text="other KV than that of tokens 64 on is stored under their key",
    wrong=">=0.4.5",
    max_num_batched_tokens=64,
    drafter="eagle",
    drafts=7,
    acceptance=0,
    lmcache={"mp.save_decode_cache": True},
)
