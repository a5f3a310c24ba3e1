"""A prompt given as embeddings has no token ids, and EngineCore dies counting them."""

from kvfix_tools.lab.scenario import Options, Scenario
from kvfix_tools.lab.steps import admit, run, settle

SCENARIO = Scenario(
    schedule=[
        admit("r", None, max_tokens=2, embeddings=(300, 0.0)),
        run(),
        settle(),
    ],
    rule="KVR011",
    text="schedule: ",
    wrong={"lmcache": ">=0.3.9"},
    options=Options(chunk_size=256, max_num_batched_tokens=1024),
)
