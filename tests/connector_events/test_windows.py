"""Stores of sliding windows in mode `check`: faults planted behind the fixes are reported, and nothing where there is
none. (The bugs themselves, without the fixes: test_table.py.)"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from kvfix_tools.lab import runner
from kvfix_tools.lab.scenario import find
from tests import late

SCENARIO = "mp-window-freed-while-stored"


def nothing(metadata: Any) -> None:
    """No fault."""


def null_blocks(metadata: Any) -> None:
    for meta in metadata.requests:
        if meta.direction == "STORE":
            meta.op.block_ids[1][-1] = 0


def block_of_others(metadata: Any) -> None:
    for meta in metadata.requests:
        if meta.direction == "STORE":
            meta.op.block_ids[1][-1] = 59


def no_step_waits(metadata: Any) -> None:
    metadata.need_flush_before_forward = metadata._kvfix_preempted = False


FAULTS: dict[Callable[[Any], None], str] = {
    nothing: "",
    null_blocks: "tokens 192 to 256 of KV group 1 are stored from null blocks",
    block_of_others: "tokens 192 to 256 of KV group 1 are stored from blocks freed before the step",
    no_step_waits: "tokens 0 to 64 of KV group 1 are stored from blocks freed after the step and used again",
}


def planted(engine: Any, fault: Callable[[Any], None]) -> None:
    """Into what the connector's last hook, fixes included, has made."""
    connector = engine.connector.in_scheduler
    process = connector._process_cached_requests

    def _process_cached_requests(output: Any, metadata: Any) -> Any:
        answer = process(output, metadata)
        fault(metadata)
        return answer

    connector._process_cached_requests = _process_cached_requests


def play_all() -> list[list[str]]:
    scenario, answer = find(SCENARIO), []
    assert scenario is not None
    for fault in FAULTS:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict("os.environ", KVFIX_DUMP_DIR=folder),
            runner.applied(True, "check"),
            runner.reported() as found,
        ):
            engine = late.LabEngine(scenario.options)
            planted(engine, fault)
            scenario.play(engine)
        answer.append([f"{each.code} {each.message}" for each in found])
    return answer


@pytest.mark.parametrize(("number", "text"), list(enumerate(FAULTS.values())), ids=[each.__name__ for each in FAULTS])
def test_reported(number: int, text: str, outcomes: list[list[str]]) -> None:
    reports = outcomes[number]
    assert [each for each in reports if not each.startswith("KVR014 ")] == []
    assert any(each.endswith(text) for each in reports) if text else not reports, reports
