"""Which releases of vLLM and LMCache the lab plays, what it can draw with them, and which arguments they know."""

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
    from kvfix_tools.lab.schedule import Schedule

#: Settings of LMCache that it has not always had, and the releases that have them. Before 0.3.15 stores by layers of
#: several requests are in one list, and one is advanced beyond its end: EngineCore dies (KVD807).
SINCE = {
    "enable_async_loading": ">=0.3.10",
    "min_retrieve_tokens": ">=0.3.14",
    "use_layerwise": ">=0.3.15",
    "max_tokens_per_load": ">=0.4.7",
    "mp.eager_prefetch": ">=0.5.4",
    "mp.save_decode_cache": ">=0.5.6",
}
#: Options of the lab that are drawn only with these releases of vLLM. With asynchronous scheduling earlier ones preempt
#: between two steps only where they reset their prefix cache, all at once; the lab does it to one, and the output that
#: is in flight comes twice. The second runner was for trials then. The others were not tried with earlier releases.
DRAWN_SINCE = dict.fromkeys(
    ("async_scheduling", "model_runner_v2", "drafter", "pause", "sessions", "roles", "stops"), ">=0.32"
)
#: Several KV groups are drawn with these: earlier connectors name no failed requests, and vLLM raises (KVF207).
WINDOWS_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: So is a group of states: earlier ones were not tried.
STATES_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Context parallelism, which LMCache's connector knows since 0.5.5, was tried with these.
CONTEXT_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Releases whose server forgets workers that are silent (`worker_registration_grace_seconds`), and those whose transfer
#: on CUDA waits for its stores (LMCacheDrivenTransferContext.flush_inflight_stores, which is `pass` up to 0.5.5).
FORGETS, FLUSHES = {"lmcache": ">=0.5.0"}, {"lmcache": ">=0.5.6"}
#: Releases of vLLM that can be told to reset a connector's cache; and those with which priorities are drawn. Earlier
#: ones have other queues, and lock out (KVF903).
RESETS, PRIORITIES = {"vllm": ">=0.15.1"}, {"vllm": ">=0.32"}
#: Those whose OffloadingConnector is played, by its jobs; vLLM's copy of LMCache's connector is not played beside it.
OFFLOADS = {"vllm": ">=0.32", "lmcache": ">=0.5.6"}
#: Several ranks are drawn with these. They were not tried with earlier ones.
RANKS_SINCE = {"lmcache": ">=0.4.5", "vllm": ">=0.32"}
#: A server that stops and goes on is drawn with these: earlier adapters have no heartbeat of their own.
STOPS_SINCE = {"lmcache": ">=0.5.6", "vllm": ">=0.32"}
#: Any other connector is played with these: vLLM calls its hooks in this order, with these tensors.
ANY_SINCE = {"vllm": (">=0.32", "the lab knows no earlier model runner's order of hooks")}


def versions() -> dict[str, str]:
    """What is installed."""
    return {dist: installed_source.version(dist) for dist in ("vllm", "lmcache")}


def code() -> str:
    """A digest of the fixes and the lab: of all that an outcome depends on, but vLLM and LMCache."""
    folders = Path(kvfix.__path__[0]), Path(__file__).parent
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    contents = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(files))
    return hashlib.sha256(contents).hexdigest()


def matches(version: str, specifier: str) -> bool:
    return bool(version) and version in SpecifierSet(specifier, prereleases=True)


def missing(needs: dict[str, str], installed: dict[str, str] | None = None) -> str:
    """Those of the needed releases that are not installed, "" if all are. needs: {distribution: PEP 440 specifiers}."""
    found = installed or versions()
    return ", ".join(f"{dist} {specifier}" for dist, specifier in needs.items() if not matches(found[dist], specifier))


def lacking() -> set[str]:
    """Settings of the lab that the installed LMCache does not have; options and steps that the vLLM is not for."""
    found = versions()
    settings = {name for name, specifier in SINCE.items() if not matches(found["lmcache"], specifier)}
    options = {name for name, specifier in DRAWN_SINCE.items() if not matches(found["vllm"], specifier)}
    others = {"new_weights": RESETS, "policy": PRIORITIES, "windows": WINDOWS_SINCE, "offloading": OFFLOADS}
    others |= {"ranks": RANKS_SINCE, "stops": STOPS_SINCE, "states": STATES_SINCE, "context": CONTEXT_SINCE}
    return settings | options | {name for name, needs in others.items() if missing(needs, found)}


def cannot_play(connector: str, installed: dict[str, str] | None = None) -> str:
    """Why this connector cannot be played on these releases, by default what is installed; "" if it can."""
    needs = KNOWN[connector].needs if connector in KNOWN else ANY_SINCE
    lacks = missing({dist: specifier for dist, (specifier, _) in needs.items()}, installed)
    why = "; ".join(reason for dist, (_, reason) in needs.items() if dist in lacks)
    return f"the lab plays {connector} with {lacks}: {why}" if lacks else ""


def no_nixl() -> str:
    """Why NIXL itself cannot make transfers here; "" if it can. It needs its build for one of CUDA's releases."""
    if find_spec("nixl") and any(find_spec(f"nixl_cu{release}") for release in (12, 13)):
        return ""
    return "NIXL is not installed: pip install nixl nixl-cu12"


def cannot_play_schedule(schedule: Schedule) -> str:
    """Why this schedule cannot be played on what is installed; "" if it can."""
    why = cannot_play(schedule.options.connector) or (schedule.options.real_transfers and no_nixl())
    lacks = sorted(lacking() & set(schedule.options.lmcache))
    return why or (f"LMCache {versions()['lmcache']} has no setting {', '.join(lacks)}" if lacks else "")


def accepted(made: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this release knows."""
    known = _parameters(made)
    return {name: value for name, value in arguments.items() if name in known}


@functools.cache
def _parameters(made: Callable[..., Any]) -> frozenset[str]:
    """Looked at once for each class: it takes as long as to make a request."""
    return frozenset(inspect.signature(made).parameters)
