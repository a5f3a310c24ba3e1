"""The releases of vLLM and LMCache that the lab plays, the options that it draws with them, and their arguments."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import installed_source
from kvfix_tools.lab.options import KNOWN

if TYPE_CHECKING:
    from kvfix_tools.lab.fuzz.schedule import Schedule

#: {setting of LMCache: releases that have it}. Before 0.3.15 layerwise stores of several requests kill EngineCore
#: (KVD807).
SINCE = {
    "enable_async_loading": ">=0.3.10",
    "min_retrieve_tokens": ">=0.3.14",
    "use_layerwise": ">=0.3.15",
    "max_tokens_per_load": ">=0.4.7",
    "mp.eager_prefetch": ">=0.5.4",
    "mp.save_decode_cache": ">=0.5.6",
}
#: {option of the lab: releases of vLLM with which it is drawn}. With asynchronous scheduling, earlier releases cannot
#: preempt a single request between two steps, as the lab does. Model runner V2 was experimental. The other options were
#: not tested with earlier releases.
DRAWN_SINCE = dict.fromkeys(
    ("async_scheduling", "model_runner_v2", "drafter", "pause", "sessions", "roles", "stops"), ">=0.32"
)
#: Releases with which several KV groups are drawn: earlier connectors report no failed requests, and vLLM raises
#: (KVF207).
WINDOWS_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Releases with which states were tested.
STATES_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Releases with which context parallelism was tested. LMCache's connector supports it since 0.5.5.
CONTEXT_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Releases whose server drops silent workers (`worker_registration_grace_seconds`), and releases whose transfer context
#: on CUDA waits for its stores (LMCacheDrivenTransferContext.flush_inflight_stores, which is `pass` up to 0.5.5).
FORGETS, FLUSHES = {"lmcache": ">=0.5.0"}, {"lmcache": ">=0.5.6"}
#: Releases of vLLM that can reset a connector's cache, and releases with which priorities are drawn. Earlier releases
#: have other queues, in which requests lock each other out (KVF903).
RESETS, PRIORITIES = {"vllm": ">=0.15.1"}, {"vllm": ">=0.32"}
#: Releases whose OffloadingConnector is played, but not together with vLLM's copy of LMCache's connector.
OFFLOADS = {"vllm": ">=0.32", "lmcache": ">=0.5.6"}
#: Releases with which several ranks were tested.
RANKS_SINCE = {"lmcache": ">=0.4.5", "vllm": ">=0.32"}
#: Releases with which a server that stops and continues is drawn: earlier adapters have no heartbeat.
STOPS_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Releases that call the hooks of any other connector in this order, with these tensors.
ANY_SINCE = {"vllm": (">=0.32", "the lab knows no earlier model runner's order of hooks")}


def versions() -> dict[str, str]:
    return {dist: installed_source.version(dist) for dist in ("vllm", "lmcache")}


def code() -> str:
    """Return a digest of the fixes and the lab: an outcome depends on these, vLLM and LMCache."""
    folders = Path(kvfix.__path__[0]), Path(__file__).parent
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    contents = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(files))
    return hashlib.sha256(contents).hexdigest()


def matches(version: str, specifier: str) -> bool:
    return bool(version) and version in SpecifierSet(specifier, prereleases=True)


def missing(needs: dict[str, str], installed: dict[str, str] | None = None) -> str:
    """Return the needed releases that are not installed, or "". needs: {distribution: PEP 440 specifiers}."""
    found = installed or versions()
    return ", ".join(f"{dist} {specifier}" for dist, specifier in needs.items() if not matches(found[dist], specifier))


def lacking() -> set[str]:
    """Return settings, options and steps that the lab does not draw with the installed releases."""
    found = versions()
    settings = {name for name, specifier in SINCE.items() if not matches(found["lmcache"], specifier)}
    options = {name for name, specifier in DRAWN_SINCE.items() if not matches(found["vllm"], specifier)}
    others = {"new_weights": RESETS, "policy": PRIORITIES, "windows": WINDOWS_SINCE, "offloading": OFFLOADS}
    others |= {"ranks": RANKS_SINCE, "stops": STOPS_SINCE, "states": STATES_SINCE, "context": CONTEXT_SINCE}
    return settings | options | {name for name, needs in others.items() if missing(needs, found)}


def cannot_play(connector: str, installed: dict[str, str] | None = None) -> str:
    """Return why this connector cannot be played on these releases, or "". Default: the installed releases."""
    needs = KNOWN[connector].needs if connector in KNOWN else ANY_SINCE
    lacks = missing({dist: specifier for dist, (specifier, _) in needs.items()}, installed)
    why = "; ".join(reason for dist, (_, reason) in needs.items() if dist in lacks)
    return f"the lab plays {connector} with {lacks}: {why}" if lacks else ""


def no_nixl() -> str:
    """Return why NIXL cannot make transfers here, or "". NIXL needs its build for a release of CUDA."""
    if find_spec("nixl") and any(find_spec(f"nixl_cu{release}") for release in (12, 13)):
        return ""
    return "NIXL is not installed: pip install nixl nixl-cu12"


def cannot_play_schedule(schedule: Schedule) -> str:
    """Return why this schedule cannot be played on the installed releases, or ""."""
    why = cannot_play(schedule.options.connector) or (schedule.options.real_transfers and no_nixl())
    lacks = sorted(lacking() & set(schedule.options.lmcache))
    return why or (f"LMCache {versions()['lmcache']} has no setting {', '.join(lacks)}" if lacks else "")


def accepted(made: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    known = _parameters(made)
    return {name: value for name, value in arguments.items() if name in known}


@functools.cache
def _parameters(made: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of a class. Cached: this takes as long as making a request."""
    return frozenset(inspect.signature(made).parameters)
