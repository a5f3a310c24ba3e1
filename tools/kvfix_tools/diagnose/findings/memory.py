"""Findings about memory that is pinned for too long, released twice, or exhausted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Number of lines from which on a warning is a finding.
MANY = 20


@finding("KVD401", "pins-run-out", Severity.LEAK, on=["pin_timeout", "forced_unpin"])
def pins_run_out(log: Diagnosis, line: LogLine) -> Answer | None:
    """The CPU cache has less room: chunks that a lookup pinned stayed pinned until the timeout of 5 minutes.

    Setting: `pin_timeout_sec` shorter, so that LMCache frees the chunks earlier.
    """
    if line.name == "forced_unpin":
        return Answer(f"{line.fields['objects']} chunks were unpinned after the timeout")
    return Answer(f"a chunk had {line.fields['pins']} pins that were not released")


@finding("KVD402", "no-memory-to-be-had", Severity.HANG, on=["no_candidates"])
def no_memory_to_be_had(log: Diagnosis, line: LogLine) -> Answer | None:
    """The engine stands still: a worker waits for memory of the CPU cache that is never freed.

    Cause: all chunks in the CPU cache are pinned, being written or being loaded, so LMCache cannot evict one. With
    `local_cpu: false` LMCache never evicts: a load that finds the buffer full waits for ever (KVF016). With
    `enable_async_loading`, LMCache 0.3.10 to 0.3.15 never releases chunks that a lookup fetched but no load used
    (KVF012).

    Setting: `local_cpu: true`, with a larger `max_local_cpu_size`, or fewer requests at once (`--max-num-seqs`).

    Normal: a few lines under load.
    """
    times = log.counts["no_candidates"]
    return Answer(f"LMCache could not evict a chunk, at least {times} times") if times >= MANY else None


@finding("KVD403", "unpinned-twice", Severity.LEAK, on=["double_unpin"])
def unpinned_twice(log: Diagnosis, line: LogLine) -> Answer | None:
    """A chunk may be evicted while it is read, because LMCache unpinned it more often than it pinned it.

    Cause: a lookup pins the chunks that it finds, and `lookup_unpin` unpins them. The load also unpins them, in these
    releases: 0.5.2 to 0.5.5 (`retrieve`), 0.4.3 to 0.5.6 with `use_layerwise`, 0.4.1 to 0.5.6 with
    `enable_async_loading`.

    Setting: `enable_async_loading: false` and `use_layerwise: false`.

    Good: LMCache 0.5.6 without `use_layerwise` and `enable_async_loading`. With one of these settings no release is
    fixed: keep kvfix (KVF018, KVF013).
    """
    return Answer(f"a chunk has pin count {line.fields['count']}")


@finding("KVD404", "stores-dropped", Severity.SLOW, on=["not_stored"])
def stores_dropped(log: Diagnosis, line: LogLine) -> Answer | None:
    """Later requests have no hits, because KV is not stored: the CPU cache has no free memory.

    Cause: the CPU cache is full, and all its chunks are pinned or being written. With `enable_pd`, prompts in transfer
    to decode fill the buffer of `pd_buffer_size` bytes.

    Setting: `export LMCACHE_MAX_LOCAL_CPU_SIZE=GB`, with a larger value (for each worker). With `enable_pd` raise
    `pd_buffer_size` too.

    Normal: a few lines under load, while other requests are stored.
    """
    times = log.counts["not_stored"]
    return Answer(f"at least {times} stores were cut or dropped") if times >= MANY else None
