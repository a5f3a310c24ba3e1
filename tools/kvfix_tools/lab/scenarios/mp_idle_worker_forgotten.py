"""A worker that has had no request for an hour is forgotten by the server, and what it then loads fails."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import admit, hour_of_silence, prompt, run, settle, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        hour_of_silence(),
        admit("r", prompt(200)),
        run(60),
        settle(),
    ],
    rule="LAB002",
    not_in_hooks=REQUEST,
    wrong={"lmcache": ">=0.5.0"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
)
