"""The lab finds that something is missing of a fix: one that fails, and one of whose patches one is left out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import RELEASES, Once


@pytest.fixture(scope="module")
def found(once: Once) -> dict[str, list[str]]:
    answer: Any = once("from tests.lab.incomplete_fixes import result", RELEASES / "0.5.6")
    return dict(answer)


def test_whole(found: dict[str, list[str]]) -> None:
    assert found["KVF003"] == []
    assert found["KVF007"] == ["the load has failed"]
    assert found["KVF205"] == ["a load has failed"]


def test_a_fault_of_kvfix_itself(found: dict[str, list[str]]) -> None:
    """The engine goes on without the fix, and says it once: here one looks at a name that is not there."""
    fault = "a fault of kvfix itself in tests.lab.incomplete_fixes.<lambda>: LookupError"
    assert f"LAB007 fault-of-kvfix : {fault}" in found["KVF003 fails"]


@pytest.mark.parametrize("less", ["what follows", "the note"])
def test_a_half(found: dict[str, list[str]], less: str) -> None:
    hole = "KVR007 store-leaves-hole sharing: tokens 64 to 112 are stored, the cache holds 0: 0 to 64 never are"
    assert found[f"KVF007 without {less}"] == [hole, "the load has failed"]


def test_a_step_in_flight_that_is_saved(found: dict[str, list[str]]) -> None:
    read = "LAB001 wrong-content r: the step reads token 192 of 326 computed ones, its slot holds other KV"
    assert read in found["KVF007 without its memory"]


def test_a_failed_load_that_is_tried_again(found: dict[str, list[str]]) -> None:
    """It fails again, and is left to vLLM then: it must not be tried for ever."""
    *wrong, first, second = found["KVF205 without the lookup"]
    assert first == second == "a load has failed"
    assert any(each.startswith("LAB008 wrong-text r: token") for each in wrong)


def test_another_engine_in_the_process_takes_nothing_away(once: Once) -> None:
    """What is noted of a request is the scheduler's own: the other one has a request of the same name."""
    code = "from tests.lab.two_engines import play\nwith runner.quiet(): result = [play(False), play(True)]"
    assert once(code, RELEASES / "0.5.6") == [[], []]
