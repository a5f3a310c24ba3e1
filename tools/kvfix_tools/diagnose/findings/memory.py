"""What is kept for too long, let go twice, or not to be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Lines from which on a warning is no passing one.
MANY = 20


@finding("KVD401", "pins-run-out", Severity.LEAK, on=["pin_timeout", "forced_unpin"])
def pins_run_out(log: Diagnosis, line: LogLine) -> Answer | None:
    """Chunks were pinned for a lookup and never let go; LMCache frees them by force after five minutes.

    Setting: a shorter `pin_timeout_sec` frees them earlier.
    """
    if line.name == "forced_unpin":
        return Answer(f"{line.fields['objects']} chunks were unpinned by force", request="")
    return Answer(f"a chunk with {line.fields['pins']} pins that were not released", request="")


@finding("KVD402", "no-memory-to-be-had", Severity.HANG, on=["no_candidates"])
def no_memory_to_be_had(log: Diagnosis, line: LogLine) -> Answer | None:
    """A worker waits for memory of the CPU cache that is never freed.

    Cause: what is in it is pinned, being written or loaded, so that nothing can be evicted. With `local_cpu: false` it
    is a buffer from which nothing is ever evicted: a load that finds it full waits for ever (KVF016). With
    `enable_async_loading` LMCache 0.3.10 to 0.3.15 never releases what a lookup fetched and no load took (KVF012).

    Setting: `local_cpu: true`, a larger `max_local_cpu_size`, fewer requests at once.

    Normal: a few lines under load.
    """
    times = log.counts["no_candidates"]
    return Answer(f"nothing to evict, {times} times and more", request="") if times >= MANY else None


@finding("KVD403", "unpinned-twice", Severity.LEAK, on=["double_unpin"])
def unpinned_twice(log: Diagnosis, line: LogLine) -> Answer | None:
    """A chunk was let go more often than it was taken: it may be evicted while it is read.

    Cause: A lookup pins the chunks that it finds, and `lookup_unpin` releases them. The load releases them too:
    `retrieve` of 0.5.2 to 0.5.5 in any set-up, `retrieve_layer` of 0.4.3 to 0.5.6 with `use_layerwise`, and 0.4.1 to
    0.5.6 with `enable_async_loading`.

    Setting: `enable_async_loading: false` and `use_layerwise: false`.

    Good: LMCache 0.5.6 where neither `use_layerwise` nor `enable_async_loading` is set; with either of them no release
    is right yet: keep kvfix (KVF018, KVF013).
    """
    return Answer(f"pin count {line.fields['count']} of a chunk", request="")


@finding("KVD404", "stores-dropped", Severity.SLOW, on=["not_stored"])
def stores_dropped(log: Diagnosis, line: LogLine) -> Answer | None:
    """KV is not stored for want of CPU memory: later requests will not find it.

    Cause: the CPU cache is full, and what is in it is pinned or being written. With `enable_pd` it is the transfer
    buffer of `pd_buffer_size` bytes: the prompts on their way to decode fill it.

    Setting: `export LMCACHE_MAX_LOCAL_CPU_SIZE=GB`, a larger one (for each worker); with `enable_pd` also a larger
    `pd_buffer_size`.

    Normal: a few lines under load, while others are stored.
    """
    times = log.counts["not_stored"]
    return Answer(f"{times} stores and more were cut or dropped", request="") if times >= MANY else None
