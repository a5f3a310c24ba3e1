"""What is kept for too long, let go twice, or not to be had."""

from __future__ import annotations

from typing import Any

from kvfix_tools.diagnose.findings import Answer, Severity, finding


@finding("KVD401", "pins-run-out", Severity.LEAK, on=["pin_timeout", "forced_unpin"], fixes=["KVF005", "KVF009"])
def pins_run_out(case: Any, seen: Any) -> Answer | None:
    """Chunks were pinned for a lookup and never let go; LMCache frees them by force after five minutes.

    Setting: a shorter `pin_timeout_sec` frees them earlier.
    """
    if seen.name == "forced_unpin":
        return Answer(f"{seen.fields['objects']} chunks were unpinned by force", request="")
    return Answer(f"a chunk with {seen.fields['pins']} pins that nobody took back", request="")


@finding("KVD402", "no-memory-to-be-had", Severity.HANG, on=["no_candidates"], fixes=["KVF016", "KVF012"])
def no_memory_to_be_had(case: Any, seen: Any) -> Answer | None:
    """A worker waits for memory of the CPU cache that nobody frees.

    Setting: `local_cpu: true`, a larger `max_local_cpu_size`, fewer requests at once.

    Normal: a few lines under load.
    """
    if case.counts["no_candidates"] < 20:
        return None
    return Answer(f"nothing to evict, {case.counts['no_candidates']} times and more", request="")


@finding("KVD403", "unpinned-twice", Severity.LEAK, on=["double_unpin"], fixes=["KVF018", "KVF013"])
def unpinned_twice(case: Any, seen: Any) -> Answer | None:
    """A chunk was let go more often than it was taken: it may be evicted while it is read.

    Setting: `enable_async_loading: false`.
    """
    return Answer(f"pin count {seen.fields['count']} of a chunk", request="")


@finding("KVD404", "stores-dropped", Severity.SLOW, on=["not_stored"])
def stores_dropped(case: Any, seen: Any) -> Answer | None:
    """KV is not stored for want of CPU memory: later requests will not find it.

    Cause: the CPU cache is full, and what is in it is pinned or being written.

    Setting: a larger `max_local_cpu_size`.
    """
    if case.counts["not_stored"] < 20:
        return None
    return Answer(f"{case.counts['not_stored']} stores and more were cut or dropped", request="")
