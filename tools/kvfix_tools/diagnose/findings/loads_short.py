"""Findings about loads that bring fewer tokens than the lookup had found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: A prompt has fewer tokens than this in CacheBlend's separators.
_SEPARATORS = 64


@finding("KVD1090", "store-does-not-give-what-it-lists", Severity.WRONG, on=["retrieved", "short"])
def store_does_not_give_what_it_lists(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load brings fewer tokens than the lookup found: the store lists chunks, but does not return them.

    Cause: the store lists the chunk, but returned nothing at the load (cache_engine.py, `The cache block is in the
    storage, but it can't be retrieved`). Mooncake: the master still lists chunks of a client that is gone. Redis: the
    header exists, but the data was evicted, or the client timed out. S3: a lifecycle rule or another writer deleted the
    object, which LMCache lists until vLLM restarts (pull 4745). Disk: the file is gone. Every store: the CPU pool has
    no room for the chunk, for which the log has a line. LMCache 0.3.9 to 0.3.12 with a single backend: the chunk was
    evicted from CPU memory (raise `max_local_cpu_size`).

    First: `grep -n -B20 "can't be retrieved" LOG` shows the error of the store, which decides. Without an error, clear
    the list of the store: restart mooncake_master, run `redis-cli FLUSHDB`, or empty the folder of local_disk. Then
    restart vLLM.

    Good: a store that keeps all chunks that it lists (all Mooncake clients up, Redis with enough maxmemory), and kvfix
    (KVF007, KVF203). In no release does vLLM remove the blocks of a failed load from its cache.
    """
    short = _missing(line)
    if not short or not log.counts["unretrievable"]:
        return None
    evicted = log.releases.within("lmcache", "<0.3.13")  # newer releases ask the store again at the load
    return Answer(short, verdict="unknown" if evicted else "violated")


@finding("KVD302", "load-comes-short", Severity.WRONG, on=["retrieved", "short", "load_failed"], symptom=True)
def load_comes_short(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load brings fewer tokens than the lookup found. vLLM computes the rest, but may store wrong KV before that.

    Cause: between lookup and load the chunks were evicted, their pins timed out, or the backend lost them. LMCache
    0.3.9 with --pipeline-parallel-size does not ask ranks of later stages (pull 1813).

    First: `export LMCACHE_MAX_LOCAL_CPU_SIZE=GB`, with a larger value (NIXL storage: `nixl_buffer_size`).
    """
    if line.name == "load_failed":
        return Answer(f"{line.fields['tokens']} tokens in {line.fields['blocks']} blocks were not loaded")
    missing = _missing(line)
    if not missing or log.counts["unretrievable"] or _between_segments(line):
        return None
    return Answer(missing)


@finding("KVD479", "hit-not-read", Severity.SLOW, on=[""])
def hit_not_read(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Hits are lost: chunks that a lookup had found could not be read at the load.

    Cause: the chunks were evicted in the meantime, the store failed (its error is in an earlier line), or the buffer
    for reading is full. This buffer is the CPU pool, or with `enable_nixl_storage` the `nixl_buffer_size` bytes, which
    must hold the KV of a whole prompt.

    Setting: `grep -n ERROR LOG` shows the errors of the store before these lines. NIXL storage: double
    `nixl_buffer_size`. Other stores: raise `max_local_cpu_size`, give Redis more `maxmemory`, or put `local_disk` on a
    separate disk.
    """
    times = log.counts["unretrievable"]
    if not times or log.counts["short"] or log.counts["retrieved"]:
        return None
    return Answer(f"{times} chunks were found by a lookup, but could not be read", "", "unknown")


def _between_segments(line: LogLine) -> bool:
    """Return True if the missing tokens are CacheBlend's separators, which lookups count but stores do not.

    CacheBlend loads layer by layer, and logs `out of total` for this."""
    if line.name != "retrieved" or b"out of total" not in line.body:
        return False
    missing = int(line.fields["required"]) - int(line.fields["tokens"])
    return missing < _SEPARATORS and missing * 50 < int(line.fields["required"])


def _missing(line: LogLine) -> str:
    f = line.fields
    due = f["expected"] if line.name == "short" else f["required"]
    return f"{f['tokens']} of {due} tokens were loaded, {due - f['tokens']} are missing" if f["tokens"] < due else ""
