"""The tiers of a real `lmcache server`, from outside: its L1 in memory, which it empties itself, and its L2 on disk.

A job's `l2`: `server` (its URL), `folder` (of the L2's files).
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any


def options(folder: Path) -> tuple[str, ...]:
    """Return the options of a server with an L2 in this folder."""
    return ("--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder)}))


def empty_l1(job: dict[str, Any]) -> None:
    """Empty L1, so that later hits come from the L2, which has all chunks."""
    idle, until = 0, time.monotonic() + 60
    while idle < 3:  # a key that is taken from the queue is not counted for a moment
        assert time.monotonic() < until, "the L2 still stores"
        stores = _storage(job)["store_controller"]
        idle = 0 if stores["pending_keys_count"] or stores["in_flight_task_count"] else idle + 1
        time.sleep(0.05)
    while objects := _storage(job)["l1_manager"]["total_object_count"]:
        assert time.monotonic() < until, f"the L1 still has {objects} objects"
        _asked(job, "/cache/clear", b"{}")


def _storage(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _asked(job, "/status")["storage_manager"]
    return found


def _asked(job: dict[str, Any], path: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(job["server"] + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def mix(job: dict[str, Any]) -> None:
    """A negative control: each chunk of the L2 gets the bytes of another one of its size."""
    by_size: dict[int, list[Path]] = {}
    for file in sorted(Path(job["folder"]).glob("*.data")):
        by_size.setdefault(file.stat().st_size, []).append(file)
    for files in by_size.values():
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, contents[1:] + contents[:1], strict=True):
            file.write_bytes(content)
