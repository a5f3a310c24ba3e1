"""A plugin of pytest for `make peers`: apply kvfix in the process, and write the outcome of each test to a file."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

import kvfix
from kvfix_tools.look import in_engine

ASKED: dict[str, str] = json.loads(os.environ["KVFIX_PEERS"])
#: True in a process in which xdist runs tests, False in the process that collects all reports.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if IS_WORKER and ASKED["mode"]:
    kvfix.apply(ASKED["mode"])


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if ASKED["mode"] == "strict":  # kvfix watches vLLM's factory, but the tests create connectors directly
        in_engine.watch_connectors()
    if ASKED["dist"] == "vllm":
        for item in items:  # vLLM's own clean-up takes half a second, so run it once for each file
            item.add_marker(pytest.mark.skip_global_cleanup)


@pytest.fixture(autouse=True, scope="module")
def clean_up() -> Iterator[None]:
    yield
    if ASKED["dist"] == "vllm":
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def pytest_runtest_logreport(report: Any) -> None:
    if not IS_WORKER:
        with open(ASKED["outcomes"], "a") as file:
            print(f"{report.nodeid}\t{report.outcome}", file=file)
