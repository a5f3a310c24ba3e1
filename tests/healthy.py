"""Help tests run the lab's random schedules without faults. Only the fixes of `changing` may change the events."""

from importlib import import_module
from typing import Any

from kvfix import catalogue
from kvfix.fixes.lmcache import kvf022_resume_shares_block_list as kvf022
from tests.conftest import ADAPTER


def changing(connector: str) -> list[str]:
    """Return the codes of fixes that change events even if the connector's schedules have no injected faults."""
    return [fix.code for fix in catalogue.fixes() if connector in fix.changes_healthy]


def violated(done: Any) -> list[str]:
    """Return all violations except those of KVR009, the rule about leaks. Every schedule leaks in each release."""
    return [str(found) for found in done.findings if found.verdict == "violated" and found.code != "KVR009"]


def events(done: Any) -> list[tuple[Any, ...]]:
    """Return all events in order, except `Left`. A `Left` event reports a leak, and some fixes remove leaks."""
    return [(step, *event) for step, event in done.log if type(event).__name__ != "Left"]


def own_blocks() -> None:
    """Apply KVF022, because its bug needs no injected fault, only a request that vLLM preempts."""
    adapter = import_module(ADAPTER)
    impl = adapter.LMCacheConnectorV1Impl
    impl.build_connector_meta = kvf022.fix(adapter)(impl.build_connector_meta)
