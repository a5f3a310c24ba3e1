"""The tiers behind the OffloadingConnector's CPU memory in the lab: vLLM's own, with files in a temporary folder.

A seed is a schedule, so threads may not decide what happens first. Real are the tiers and their files; lookups run in
the thread that asks, and what a tier has done it reports some steps later.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfix_tools.lab.options import Options


class Tiers:
    """`manager`: of the connector. delay: steps that a transfer takes."""

    def __init__(self, manager: Any, delay: int) -> None:
        self._tiers = list(getattr(manager, "secondary_tiers", ()))
        self._manager = manager
        self._late = [_Late(tier, delay) for tier in self._tiers]
        self._lookups = [tier._lookup_manager for tier in self._tiers if hasattr(tier, "_lookup_manager")]
        for lookups in self._lookups:
            lookups._lookup_queue.put(None)  # its thread ends
            lookups._thread.join()
            lookups._lookup_queue = _AtOnce(lookups)
        self._files = [Path(tier.file_mapper.base_path) for tier in self._tiers if hasattr(tier, "file_mapper")]

    @staticmethod
    def folder(options: Options) -> tempfile.TemporaryDirectory[str] | None:
        """Where a tier of files has them."""
        return tempfile.TemporaryDirectory(prefix="kvfix-lab-") if options.tier == "fs" else None

    def tick(self) -> None:
        """A step of the engine begins."""
        for tier in self._late:
            tier.tick()

    @property
    def looking(self) -> bool:
        """Whether a lookup in a tier is not answered yet."""
        return any(lookups._lookup_batch for lookups in self._lookups)

    def delete_files(self, how_many: int) -> int:
        """Others delete the oldest files."""
        files = sorted(path for folder in self._files for path in folder.parent.rglob("*.bin"))[:how_many]
        for path in files:
            path.unlink()
        return len(files)

    def kept(self) -> dict[str, set[str]]:
        kept = {"TieringOffloadingManager._req_state": set(getattr(self._manager, "_req_state", ()))}
        for lookups in self._lookups:
            kept["AsyncLookupManager._req_keys"] = set(lookups._req_keys)
        return kept

    def close(self) -> None:
        self._manager.shutdown()


class _Late:
    """A tier reports what it has done `delay` steps after it was told to, by the lab's steps."""

    def __init__(self, tier: Any, delay: int) -> None:
        self._tier = tier
        self._delay = delay
        self._now = 0
        self._held: list[tuple[int, Any]] = []
        self._finished = tier.get_finished_jobs
        self._drain = tier.drain_jobs
        tier.get_finished_jobs, tier.drain_jobs = self._due, self._drained

    def tick(self) -> None:
        self._now += 1
        self._drain()
        self._held += [(self._now + self._delay - 1, done) for done in sorted(self._finished(), key=_job)]

    def _due(self) -> Iterable[Any]:
        due = [done for when, done in self._held if when <= self._now]
        self._held = [(when, done) for when, done in self._held if when > self._now]
        return due

    def _drained(self) -> None:
        """As at a reset: all is done now."""
        self._drain()
        self._held = [(self._now, done) for _, done in self._held]
        self._held += [(self._now, done) for done in sorted(self._finished(), key=_job)]


def _job(done: Any) -> Any:
    return done.job_id


class _AtOnce:
    """In place of the queue to a tier's thread for lookups: its loop runs for what is put in, and ends."""

    def __init__(self, lookups: Any) -> None:
        self._lookups = lookups
        self._items: list[Any] = []

    def put(self, batch: Any) -> None:
        if batch is not None:
            self._items = [batch, None]
            self._lookups._worker()

    def get(self) -> Any:
        return self._items.pop(0)
