"""What gives vLLM's release away where a log does not name it: where EngineCore dies, and the files of a traceback."""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import statements

#: `EngineCore failed to start` stands so many lines before `EngineCore encountered a fatal error` (0.9.2 to 0.33.0).
_BEFORE = 2
_CONNECTORS, _OFFLOAD = "vllm/distributed/kv_transfer/kv_connector/v1/", "vllm/v1/kv_offload/"
#: {a file or folder: the releases that can have code there}; of several the longest. Bounds are releases that were
#: looked at (tests/diagnose/test_releases.py), so a range may be wider than it has to be.
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
    """All releases of vLLM whose statements are known."""
    return frozenset(release for row in statements.known()["vllm"] for release in row.lines)


@lru_cache(maxsize=1)
def _deaths() -> dict[int, frozenset[str]]:
    deaths: dict[int, set[str]] = {}
    for row in statements.known()["vllm"]:
        for release, lines in row.lines.items() if row.message == "fatal" else ():
            # The first is EngineCoreProc's; an actor of Ray's has no line of its own for a start that fails.
            for line in (*lines, min(lines) - _BEFORE):
                deaths.setdefault(line, set()).add(release)
    return {line: frozenset(found) for line, found in deaths.items()}


@lru_cache(maxsize=1024)
def of_statement(place: str) -> frozenset[str]:
    """Releases whose EngineCore dies, or does not start, here (`core.py:1332`); empty: it is no such place."""
    path, _, line = place.rpartition(":")
    return _deaths().get(int(line), frozenset()) if path.rpartition("/")[2] == "core.py" else frozenset()


@lru_cache(maxsize=4096)
def of_file(path: str) -> frozenset[str]:
    """Releases that can have code in this file of a traceback; empty: it says nothing."""
    for place in sorted(FILES, key=len, reverse=True) if "/kv_" in path or "kv_offload/" in path else ():
        if place in path:
            allowed = SpecifierSet(FILES[place])
            return frozenset(release for release in releases() if release in allowed)
    return frozenset()
