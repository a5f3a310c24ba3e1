"""Infer vLLM's release from the line at which EngineCore dies, and from the files of a traceback."""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import statements

#: Lines in core.py between `EngineCore failed to start` and `EngineCore encountered a fatal error` (0.9.2 to 0.33.0).
_BEFORE = 2
_CONNECTORS, _OFFLOAD = "vllm/distributed/kv_transfer/kv_connector/v1/", "vllm/v1/kv_offload/"
#: {file or folder: releases that have code there}. The longest match counts. The bounds are examined releases
#: (tests/diagnose/test_releases.py), so a range may be too wide.
FILES = {
    f"{_CONNECTORS}nixl_connector.py": "<0.20.2",
    f"{_CONNECTORS}nixl/": ">0.15.1",
    f"{_CONNECTORS}nixl/worker.py": ">0.15.1,<0.26",
    f"{_CONNECTORS}nixl/base_worker.py": ">0.20.2",
    f"{_CONNECTORS}nixl/pull_worker.py": ">0.20.2",
    f"{_CONNECTORS}nixl/push_worker.py": ">0.20.2",
    f"{_CONNECTORS}mooncake_connector.py": ">0.11.2.post2,<0.20.2",
    f"{_CONNECTORS}mooncake/": ">0.15.1",
    f"{_CONNECTORS}mooncake/store/": ">0.20.2",
    f"{_CONNECTORS}offloading/": ">0.15.1",
    f"{_CONNECTORS}p2p/": "<0.26",
    f"{_OFFLOAD}worker/": "<0.26",
    f"{_OFFLOAD}backends/": "<0.20.2",
    f"{_OFFLOAD}cpu/": ">0.15.1",
    f"{_OFFLOAD}cpu/gpu_worker.py": ">0.20.2",
    f"{_OFFLOAD}tiering/": ">0.20.2",
    "vllm/v1/simple_kv_offload/": ">0.15.1",
}


@lru_cache(maxsize=1)
def releases() -> frozenset[str]:
    """Return all releases of vLLM whose statements are known."""
    return frozenset(release for row in statements.known()["vllm"] for release in row.lines)


@lru_cache(maxsize=1)
def _deaths() -> dict[int, frozenset[str]]:
    deaths: dict[int, set[str]] = {}
    for row in statements.known()["vllm"]:
        for release, lines in row.lines.items() if row.message == "fatal" else ():
            # The first line is EngineCoreProc's. Ray's actor has no line for a failed start.
            for line in (*lines, min(lines) - _BEFORE):
                deaths.setdefault(line, set()).add(release)
    return {line: frozenset(found) for line, found in deaths.items()}


@lru_cache(maxsize=1024)
def of_statement(place: str) -> frozenset[str]:
    """Return the releases that log the death of EngineCore at this place (`core.py:1332`); empty for other places."""
    path, _, line = place.rpartition(":")
    return _deaths().get(int(line), frozenset()) if path.rpartition("/")[2] == "core.py" else frozenset()


@lru_cache(maxsize=4096)
def of_file(path: str) -> frozenset[str]:
    """Return the releases that have this file of a traceback; empty if the file does not narrow them."""
    for place in sorted(FILES, key=len, reverse=True) if "/kv_" in path or "kv_offload/" in path else ():
        if place in path:
            allowed = SpecifierSet(FILES[place])
            return frozenset(release for release in releases() if release in allowed)
    return frozenset()
