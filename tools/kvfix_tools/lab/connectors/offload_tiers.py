"""OffloadingConnector's secondary tiers in the lab: vLLM's own, with files in a temporary folder.

A seed must always play the same way, so threads must not change the order of events. Lookups run in the calling
thread, and a tier reports its results some steps later.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvfix_tools.lab.options import Options


class Tiers:
    """The tiers of the connector's `manager`, at most one. They report their results `delay` steps after the request.

    The threads of a tier work while a request is submitted: otherwise a lookup in the same step may find a file or not.
    """

    def __init__(self, manager: Any, delay: int) -> None:
        self._manager, self._delay, self._now = manager, delay, 0
        tiers = list(getattr(manager, "secondary_tiers", ()))
        #: The functions that return the finished jobs of a tier.
        self._finished: list[Callable[[], Iterable[Any]]] = []
        #: (step, result) of the jobs that are not reported.
        self._held: list[tuple[int, Any]] = []
        for tier in tiers:
            self._finished.append(tier.get_finished_jobs)
            drain = tier.drain_jobs
            tier.submit_store, tier.submit_load = _then(tier.submit_store, drain), _then(tier.submit_load, drain)
            tier.get_finished_jobs, tier.drain_jobs = self._due, self._report_all
        self._lookups = [tier._lookup_manager for tier in tiers if hasattr(tier, "_lookup_manager")]
        for lookups in self._lookups:
            lookups._lookup_queue.put(None)  # ends its thread
            lookups._thread.join()
            lookups._lookup_queue = AtOnce()
            lookups._lookup_queue.run = lookups._worker
        self._files = [Path(tier.file_mapper.base_path) for tier in tiers if hasattr(tier, "file_mapper")]

    @staticmethod
    def folder(options: Options) -> tempfile.TemporaryDirectory[str] | None:
        return tempfile.TemporaryDirectory(prefix="kvfix-lab-") if options.tier == "fs" else None

    def tick(self) -> None:
        self._now += 1
        self._hold(self._delay - 1)

    def _hold(self, steps: int) -> None:
        for finished in self._finished:
            self._held += [(self._now + steps, done) for done in sorted(finished(), key=lambda done: done.job_id)]

    def _due(self) -> Iterable[Any]:
        due = [done for when, done in self._held if when <= self._now]
        self._held = [(when, done) for when, done in self._held if when > self._now]
        return due

    def _report_all(self) -> None:
        """Report all results at once, as at a reset."""
        self._held = [(self._now, done) for _, done in self._held]
        self._hold(0)

    @property
    def looking(self) -> bool:
        """Return True if a lookup in a tier is not answered yet."""
        return any(lookups._lookup_batch for lookups in self._lookups)

    def delete_files(self, how_many: int) -> int:
        """Delete the oldest files, as other processes can do."""
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


def _then(submit: Callable[[Any], None], drain: Callable[[], None]) -> Callable[[Any], None]:
    """Return `submit`, which then waits for the threads of its tier."""

    def submitted(job: Any) -> None:
        submit(job)
        drain()

    return submitted


class AtOnce:
    """Replaces the queue to a thread: run the loop of the thread for each item."""

    #: The loop of the thread. It gets an item, and then None, which ends the thread.
    run: Any

    def __init__(self) -> None:
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        if item is not None:
            self._items = [item, None]
            self.run()

    def get(self) -> Any:
        return self._items.pop(0)
