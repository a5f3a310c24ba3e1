"""A load fails while the next step is in flight, on a real engine with asynchronous scheduling: KVF205, KVF007, KVF203.

As released, answers are wrong, those of later requests too, and the engine dies. Two engines each play the cases of
failed_loads.py. Stand-ins: CUDA's events and streams, and LMCache's GPU connector.
"""

from typing import Any

import pytest

from tests.engine import start
from tests.engine.start import Ran

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

JOB: dict[str, Any] = {
    "program": "failed_loads.py",
    "engine": {
        "max_model_len": 1024,
        "num_gpu_blocks_override": 129,
        "max_num_batched_tokens": 384,
        "long_prefill_token_threshold": 256,  # leaves room for the sharer next to the long prompt
    },
    "environment": start.ONE_PROCESS,
}
TRANSFER = {**start.v1(64), "kv_load_failure_policy": "recompute"}
#: Tokens in the step whose load fails, and in the one that is in flight by then.
STEPS = {
    "healthy": None,
    "long": [{"other": 1, "load": 256}, {"other": 1, "load": 256}],
    "sharer": [{"other": 1, "load": 256}, {"other": 1, "load": 256, "sharer": 108}],
    "short": [{"other": 1, "load": 8}, {"other": 1, "load": 1}],
}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return start.run(tmp_path_factory.mktemp("released"), apply=False, transfer=TRANSFER, **JOB)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """In mode `check`, so that false alarms on a healthy engine are seen too."""
    return start.run(tmp_path_factory.mktemp("fixed"), apply=True, transfer=TRANSFER, mode="check", **JOB)


def case(ran: Ran, name: str) -> dict[str, Any]:
    """It was asynchronous, and its load failed with two steps in flight (or, of the healthy one, did not)."""
    assert ran.answer["scheduler"] == "AsyncScheduler"
    found: dict[str, Any] = ran.answer["cases"][name]
    assert found["failed"] == ([{"blocks": 6, "steps": STEPS[name]}] if STEPS[name] else [])
    return found


def tokens(answers: dict[str, Any]) -> dict[str, list[int]]:
    return {name: answer["tokens"] for name, answer in answers.items()}


def wrong(found: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Whose answer was wrong, and who was answered wrong from LMCache when asked for again."""
    right = tokens(found["right"])
    first, again = tokens(found["answers"]), tokens(found["again"])
    assert first.keys() == right.keys() - {"first"}
    assert not any(answer["cached"] for answer in found["right"].values())
    return (
        {name for name, answer in first.items() if answer != right[name]},
        {name for name, answer in again.items() if answer != right[name]},
    )


def test_a_load_that_succeeds(released: Ran, fixed: Ran) -> None:
    """Step by step as without kvfix, and the load took place."""
    plain, with_kvfix = case(released, "healthy"), case(fixed, "healthy")
    assert wrong(plain) == (set(), set())
    assert with_kvfix == plain
    assert plain["answers"]["load"]["cached"] == 192


def test_every_hit_was_loaded(fixed: Ran) -> None:
    """Else the right answers of those that are asked for again would prove nothing."""
    cases = fixed.answer["cases"]
    cached = {name: {each: a["cached"] for each, a in case["again"].items()} for name, case in cases.items()}
    assert cached == {
        "healthy": {"load": 192},
        "long": {"load": 704},
        "sharer": {"load": 704, "sharer": 256},
        "short": {"load": 192},
    }
    loaded = sum(line["tokens"] for line in fixed.notes if line["what"] == "load")
    assert loaded == cases["healthy"]["answers"]["load"]["cached"] + sum(sum(each.values()) for each in cached.values())


@pytest.mark.parametrize("name", ["long", "sharer", "short"])
def test_with_kvfix_all_are_right(name: str, fixed: Ran) -> None:
    found = case(fixed, name)
    assert wrong(found) == (set(), set())


def test_check_reports_nothing_and_kvfix_has_no_fault(fixed: Ran) -> None:
    assert "Report: " not in fixed.log
    assert "a fault of kvfix itself" not in fixed.log
    verdicts = fixed.answer["verdicts"]
    assert {verdicts[code] for code in ("KVF007", "KVF022", "KVF203", "KVF205")} == {"applied"}


class TestAsReleased:
    def test_what_is_stored_is_wrong(self, released: Ran) -> None:
        """No token of it was in flight, so its own answer is right."""
        assert wrong(case(released, "long")) == (set(), {"load"})

    def test_who_shares_its_blocks_is_answered_wrong(self, released: Ran) -> None:
        assert wrong(case(released, "sharer")) == ({"sharer"}, {"load", "sharer"})

    def test_the_engine_dies(self, released: Ran) -> None:
        """The worker is given the token -1 for one that was dropped."""
        failed = [{"blocks": 6, "steps": STEPS["short"]}]
        assert released.answer["died"] == {"of": "index out of range in self", "failed": failed}
