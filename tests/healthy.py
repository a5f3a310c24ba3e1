"""When a schedule is healthy, and what of it a fix or a patch must leave as it is. For tests that play them twice."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvfix.fixes.lmcache import kvf022_resume_shares_block_list as kvf022
from tests.conftest import ADAPTER

#: Fixes that also change what no rule looks at, by connector: vLLM's copy stores too little after a miss where vLLM
#: has a prefix itself. LMCache 0.3.11 forgets what was found where vLLM has it too, and KVF019 does not. With model
#: runner V2 what a resumed request has generated and computes again is not stored, as it is with V1 (KVF023). After a
#: step without tokens, for want of blocks, KVF208 lets another loaded request go first; here others free blocks later.
UNSEEN = {"mp-in-tree": ["KVF102", "KVF208"], "mp": ["KVF208"], "v1": ["KVF019", "KVF023"]}


def violated(done: Any) -> list[str]:
    """What was violated. Not a leak that is in every release and no schedule can do without (KVR009)."""
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
