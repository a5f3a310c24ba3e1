"""Healthy schedules, and the events that a fix or a patch must not change. For tests that play a schedule twice."""

from importlib import import_module
from typing import Any

from kvfix import catalogue
from kvfix.fixes.lmcache import kvf022_resume_shares_block_list as kvf022
from tests.conftest import ADAPTER


def changing(connector: str) -> list[str]:
    """Codes of the fixes that also change healthy schedules of this connector, for what no rule looks at."""
    return [fix.code for fix in catalogue.fixes() if connector in fix.changes_healthy]


def violated(done: Any) -> list[str]:
    """Return the violations, without the leak (KVR009) that every release has in every schedule."""
    return [str(found) for found in done.findings if found.verdict == "violated" and found.code != "KVR009"]


def events(done: Any) -> list[tuple[Any, ...]]:
    """All that happened, in order; but for leaks found at the end, which some fixes clean up."""
    return [(step, *event) for step, event in done.log if type(event).__name__ != "Left"]


def own_blocks() -> None:
    """In this process LMCache's tracker has a list of blocks of its own, and all else is as released.

    For tests of the lab itself: without it, plain schedules in which a request is preempted violate rules.
    """
    adapter = import_module(ADAPTER)
    impl = adapter.LMCacheConnectorV1Impl
    impl.build_connector_meta = kvf022.fix(adapter)(impl.build_connector_meta)
