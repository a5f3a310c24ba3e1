import ast
from pathlib import Path
from typing import Any

import pytest

from kvfix import engine_state
from tests.conftest import NEWEST, Fresh, Once
from tests.engine_state import wedged


def row(state: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (each for each in state["scheduler"]["requests"] if each["id"] == name)
    return dict(found)


def test_requests_that_wait_behind_one_another(once: Once) -> None:
    first, second = once(wedged.twice, NEWEST, "locked_out_engine")
    ids = [(each["id"], each["queue"], each["needs"]) for each in second["scheduler"]["requests"]]
    assert ids == [("r", "kv_holding_waiting", 8), ("low", "kv_holding_waiting", 1)]
    assert second["scheduler"]["pool"] == {"blocks": 20, "free": 4, "cached": 9, "reserved": 9}
    low = row(second, "low")
    assert (low["computed"], low["total"], low["blocks"], low["report"]) == (128, 140, 8, "loaded")
    assert len(low["block_ids"][0]) == len(low["hashes"]) == 8
    assert second["scheduler"]["policy"] == "priority"
    assert [each["role"] for each in second["connectors"]] == ["SCHEDULER", "WORKER"]
    for each, again in zip(first["scheduler"]["requests"], second["scheduler"]["requests"], strict=True):
        assert {**again, "arrived": each["arrived"]} == each


def test_arrival_orders_the_requests(once: Once) -> None:
    """All requests of the lab arrive within one millisecond, so `arrived` must be exact to a few microseconds."""
    came, rows = once(wedged.arrivals, NEWEST)
    seconds = [each["arrived"] + came[each["id"]] for each in rows]
    assert seconds == pytest.approx(seconds[:1] * len(rows), abs=2e-6)


@pytest.mark.parametrize("reserve", [True, False], ids=["whole", "step"])
@pytest.mark.parametrize("windows", [(), (32,), (64, 16)], ids=str)
def test_needed_blocks_equal_the_count_of_vllm(once: Once, windows: tuple[int, ...], reserve: bool) -> None:
    compared = once(wedged.asked_and_needed, NEWEST, windows, reserve)
    assert [ours for ours, _ in compared] == [theirs for _, theirs in compared]
    assert len({theirs for _, theirs in compared}) > 3


def test_a_load_in_flight(once: Once) -> None:
    state = once(wedged.twice, NEWEST, "begun_to_load")[0]
    found = row(state, "r")
    assert (found["status"], found["source"]) == ("WAITING_FOR_REMOTE_KVS", "connector")
    assert (found["promised"], found["granted"], found["loading"], found["blocks"]) == (192, 192, [0, 192], 12)
    assert [(each.get("loads"), each["healthy"]) for each in state["connectors"]] == [(None, True), (["r"], True)]
    assert state["kvfix"] is None
    assert state["versions"]["vllm"]


def test_the_recorder_has_the_ages(once: Once) -> None:
    state = once(wedged.with_recorder, NEWEST)
    found = row(state, "r")
    assert (state["kvfix"]["mode"], found["source"]) == ("observe", "recorder")
    assert (found["asked"], found["promised"], found["granted"], found["loading"]) == (0, 192, 192, [0, 192])
    assert found["since"] >= 0


def test_unreadable_state_is_named(once: Once) -> None:
    state = once(wedged.planted_fault, NEWEST)
    assert state["scheduler"] is None
    assert state["unread"]["scheduler"].startswith("AttributeError (engine_state/scheduler.py:")
    assert len(state["connectors"]) == 2


@pytest.mark.parametrize("file", sorted(Path(engine_state.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_it_imports_the_standard_library_and_itself_only(file: Path) -> None:
    """kvfix sends these modules into processes without kvfix."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module in ("__future__", "types", "typing", "collections.abc")
        if isinstance(node, ast.Import):
            assert {each.name for each in node.names} <= {"faulthandler", "os", "re", "sys", "time", "threading"}


def test_a_process_without_vllm(fresh: Fresh) -> None:
    state = fresh("from kvfix import engine_state; result = engine_state.collect()")
    assert (state["scheduler"], state["connectors"], state["unread"], state["hook"]) == (None, [], {}, "")
