"""Apply the default fixes in only one of two engines, as in a roll-out. The fixes must cause no new violation."""

from functools import partial
from math import inf
from typing import Any
from unittest import mock

import pytest

import kvfix
from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests import late
from tests.conftest import RELEASES, Once, answers

SEEDS = {"nixl-pull": 10, "nixl-push": 10, "mooncake": 12}
#: (connector, the engine with the fixes, number of random schedules). Each schedule has its own seed.
PLAYED = [
    *((name, side, seeds) for name, seeds in SEEDS.items() for side in ("prefill", "decode")),
    *((name, "one", 16) for name in ("v1", "mp")),
]


def fuzzed(connector: str, fixes_in: str, seeds: int) -> dict[str, Any]:
    # Without fixes, some schedules never end. All other schedules of these seeds end within 500 steps.
    with mock.patch.object(late.fuzz_run, "play", partial(late.play, end=500)):
        return dict(late.fuzz(late.Run(connector, True, fixes_in=fixes_in), range(seeds), inf, shrinking=0).as_json())


@pytest.mark.parametrize(("connector", "fixes_in", "seeds"), PLAYED)
def test_no_finding_that_the_release_does_not_have(connector: str, fixes_in: str, seeds: int, once: Once) -> None:
    done = once(fuzzed, RELEASES / "0.5.6", connector, fixes_in, seeds)
    assert done["violations"] == []
    assert done["retrieved_tokens"] > 0
    assert done["counts"].get("violated_as_released", 0) < done["seeds"], "no seed was clean"


@pytest.mark.parametrize(
    ("only", "fixes_in", "answer"),
    [([], "first", [192, 192]), (["KVF017"], "first", [0, 0]), (["KVF017"], "nobody", [192, 192])],
)
@answers(also="answer")
def test_what_an_opt_in_fix_does_in_one_engine(only: list[str], fixes_in: str) -> list[int]:
    """If only one of two engines has KVF017, no engine loads the other engine's chunks. Return the loaded tokens."""
    loaded = []
    with late.pair_engine.fixes_in(fixes_in):
        kvfix.apply(only=only)
        for order in (1, -1):
            first, second = late.Neighbours(Options(chunk_size=64, max_num_batched_tokens=512)).engines[::order]
            for engine, name in ((first, "a"), (second, "b")):
                with engine.running():
                    engine.serve(name, prompt(200), cache_salt="tenant")  # KVF017 puts the salt into the keys
            loaded.append(second.counts["loaded_tokens"])
    return loaded


@pytest.mark.parametrize("connector", SEEDS)
@pytest.mark.parametrize(
    ("fixes_in", "answer"), [("prefill", [["prefill"], ["decode"]]), ("decode", [["decode"], ["prefill"]])]
)
@answers(also="answer")
def test_the_fixes_act_in_that_engine_alone(connector: str, fixes_in: str) -> list[list[str]]:
    """Return the engines in which functions ran with fixes, and the engines in which functions ran without fixes."""
    ran: tuple[set[str], set[str]] = set(), set()
    pair_engine = late.pair_engine
    choose = pair_engine._in_one

    def noting(inner: Any, fixed: Any) -> Any:
        def note(function: Any, engines: set[str]) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                engines.add(pair_engine._RUNNING.get())
                return function(*args, **kwargs)

            return called

        return choose(note(inner, ran[1]), note(fixed, ran[0]))

    with pair_engine.fixes_in(fixes_in):
        pair_engine._in_one = noting
        kvfix.apply()
        pair = late.Pair(Options(connector=connector, num_blocks=40, max_num_batched_tokens=64))
        for name, ask in (("a", pair.ask), ("b", pair.ask_at_once), ("c", pair.ask)):
            ask(name, prompt(100), 5)
        pair.step(3)
        pair.abort("c")
        pair.restart("decode", 40)
        pair.run()
        pair.expect_all_ended()
    return [sorted(each) for each in ran]


@pytest.mark.parametrize(
    ("connector", "seed", "code", "answer"),
    [
        # If only one engine has KVF353, the engines count tokens differently. So KVF353 is opt-in.
        ("nixl-pull", 1, "KVF353", [True, True, True]),
        # With KVF364, requests end earlier, and decode's messages change. One message then triggers the bug of KVF369.
        ("mooncake-multi", 35, "KVF364", [True, False, False]),
    ],
)
@answers(also="answer")
def test_a_fix_in_prefill_alone(connector: str, seed: int, code: str) -> list[bool]:
    """Return whether violations exist, whether the fix causes any violation, and whether the fix causes all."""
    run = late.Run(connector, True, fixes_in="prefill")
    (schedule,) = run.schedules([seed])
    with late.pair_engine.fixes_in("prefill"):
        kvfix.apply(only=[code])
        violations = late.play(schedule).violations
        by_itself = run.not_as_released(schedule, violations)
        return [bool(violations), bool(by_itself), by_itself == violations]
