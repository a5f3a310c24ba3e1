"""After one lookup that timed out the scheduler never asks the server again: its heartbeat never starts."""

from kvfix_tools.lab.scenario import SERVER, Options, Scenario
from kvfix_tools.lab.steps import admit, expect_hit, lookup_times_out, prompt, run, settle, step, stored_elsewhere

SCENARIO = Scenario(
    schedule=[
        stored_elsewhere(prompt(128)),
        admit("before", prompt(140, seed=1)),
        step(),
        lookup_times_out(),
        run(),
        step(),  # a heartbeat would have found the server by now
        admit("r", prompt(140)),
        run(),
        settle(),
        expect_hit("r"),
    ],
    rule="LAB006",
    not_in_hooks=SERVER,
    wrong={"lmcache": ">=0.5.0,<0.5.6"},
    needs={"lmcache": ">=0.4.5"},
    options=Options(connector="mp", block_size=16, num_blocks=60, chunk_size=64, max_num_batched_tokens=256),
)
