"""Find out which releases the lab plays, which options the fuzzer draws, and which arguments a class accepts."""

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import installed_source
from kvfix_tools.lab.options import KNOWN, Options

_SINCE_0_32 = {"vllm": ">=0.32"}
_SINCE_0_5_6 = {**_SINCE_0_32, "lmcache": ">=0.5.6"}
#: Features that the fuzzer draws for 3 of 10 schedules (fuzz/schedule.py), from vLLM 0.32 on. With asynchronous
#: scheduling, the lab preempts single requests between two steps, which vLLM before 0.32 cannot do. The model runner V2
#: of vLLM before 0.32 was experimental. The other features were not tested with earlier releases.
FEATURES = ("async_scheduling", "model_runner_v2", "drafter", "pause", "sessions", "roles", "stops")
#: Keys: LMCache settings, lab options and lab steps. Values: the releases with which the fuzzer draws the key.
_DRAWN = {
    "enable_async_loading": {"lmcache": ">=0.3.10"},
    "min_retrieve_tokens": {"lmcache": ">=0.3.14"},
    # in earlier releases layerwise stores of several requests kill the worker (KVD807)
    "use_layerwise": {"lmcache": ">=0.3.15"},
    "max_tokens_per_load": {"lmcache": ">=0.4.7"},
    "mp.eager_prefetch": {"lmcache": ">=0.5.4"},
    "mp.save_decode_cache": {"lmcache": ">=0.5.6"},
    **dict.fromkeys(FEATURES, _SINCE_0_32),
    "stops": _SINCE_0_5_6,  # earlier adapters have no heartbeat
    "new_weights": {"vllm": ">=0.15.1"},  # earlier releases cannot reset a connector's cache
    # in earlier releases, a waiting request without blocks can block loaded requests behind it for ever (KVF903)
    "policy": _SINCE_0_32,
    # earlier connectors report no failed requests, so with several KV groups vLLM raises at a failed load (KVF207)
    "windows": _SINCE_0_5_6,
    "states": _SINCE_0_5_6,
    "context": _SINCE_0_5_6,  # LMCache 0.5.5 also supports DCP, but the lab does not draw it
    "offloading": _SINCE_0_5_6,
    "ranks": {**_SINCE_0_32, "lmcache": ">=0.4.5"},
}
#: FORGETS: releases whose server drops silent workers (`worker_registration_grace_seconds`). FLUSHES: releases in
#: which `flush_inflight_stores` waits for stores in flight on CUDA. In 0.5.5 the function does nothing.
FORGETS, FLUSHES = {"lmcache": ">=0.5.0"}, {"lmcache": ">=0.5.6"}
#: The releases on which the lab plays connectors outside `KNOWN`. These releases call the hooks in the lab's order.
ANY_SINCE = {"vllm": (">=0.32", "the order of hook calls in earlier releases was not examined")}


def versions() -> dict[str, str]:
    return {dist: installed_source.version(dist) for dist in ("vllm", "lmcache")}


def code() -> str:
    """Return a digest of the code of the fixes and the lab. Outcomes depend on this code, vLLM and LMCache."""
    folders = Path(kvfix.__path__[0]), Path(__file__).parent
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.name}\0".encode() + (content if path.suffix == ".json" else _without_texts(content)))
    return digest.hexdigest()


def _without_texts(source: bytes) -> bytes:
    """Return the code of a module without comments and docstrings. Docstrings of `async def` functions are kept."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            del node.body[0]
    return ast.dump(tree).encode()


def matches(version: str, specifier: str) -> bool:
    return bool(version) and version in SpecifierSet(specifier, prereleases=True)


def missing(needs: dict[str, str], installed: dict[str, str] | None = None) -> str:
    """Return the needed releases that are not installed, or "". needs: {distribution: PEP 440 specifiers}."""
    found = installed or versions()
    return ", ".join(f"{dist} {specifier}" for dist, specifier in needs.items() if not matches(found[dist], specifier))


def lacking() -> set[str]:
    """Return settings, options and steps that the lab does not draw with the installed releases."""
    found = versions()
    return {name for name, needs in _DRAWN.items() if missing(needs, found)}


def cannot_play(connector: str, installed: dict[str, str] | None = None) -> str:
    """Return why the lab cannot play this connector on these releases (default: the installed releases), or ""."""
    needs = KNOWN[connector].needs if connector in KNOWN else ANY_SINCE
    lacks = missing({dist: specifier for dist, (specifier, _) in needs.items()}, installed)
    why = "; ".join(reason for dist, (_, reason) in needs.items() if dist in lacks)
    return f"the lab plays {connector} with {lacks}: {why}" if lacks else ""


def no_nixl() -> str:
    """Return why NIXL cannot make transfers here, or "". NIXL also needs the package nixl_cuN for CUDA release N."""
    if find_spec("nixl") and any(find_spec(f"nixl_cu{release}") for release in (12, 13)):
        return ""
    return "NIXL is not installed: pip install nixl nixl-cu12"


def cannot_play_options(options: Options) -> str:
    """Return why a schedule with these options cannot be played on the installed releases, or ""."""
    why = cannot_play(options.connector) or (options.real_transfers and no_nixl())
    lacks = sorted(lacking() & set(options.lmcache))
    return why or (f"the lab plays LMCache {versions()['lmcache']} without {', '.join(lacks)}" if lacks else "")


def accepted(made: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _signature(made).parameters}


#: Cached, because reading a signature takes as long as making a vLLM `Request`.
_signature = functools.cache(inspect.signature)
