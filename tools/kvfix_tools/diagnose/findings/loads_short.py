"""Loads that bring less than the lookup had promised: the store does not give it, or it was lost in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Tokens of CacheBlend's separators in a prompt: fewer than these, and a small part of it.
_SEPARATORS = 64


@finding("KVD1090", "store-does-not-give-what-it-lists", Severity.WRONG, on=["retrieved", "short"])
def store_does_not_give_what_it_lists(log: Diagnosis, line: LogLine) -> Answer | None:
    """The store lists chunks and gives nothing for their keys: the load comes short.

    Cause: the worker's store lists the chunk, and gave none (cache_engine.py, `The cache block is in the storage, but
    it can't be retrieved`). LMCache 0.3.9 to 0.3.12 with one backend alone do not ask it again after the lookup: there
    the chunk may also have been evicted from CPU memory meanwhile (a larger `max_local_cpu_size`). Mooncake: the master
    still lists what lay on a client that is gone or was restarted. Redis: the header is left and the data was
    evicted, or the client timed out. S3: what a lifecycle rule or another writer deletes LMCache remembers until vLLM
    is restarted (pull 4745). Disk: the file is gone. Each of them: no room in the CPU pool to read it into, which has
    a line of its own.

    First: `grep -n -B20 "can't be retrieved" LOG` shows the error of the store, which decides. Without one, make
    the store forget what it lists: restart mooncake_master, `redis-cli FLUSHDB`, or empty the folder of local_disk;
    then restart vLLM.

    Good: a store that keeps what it lists (all Mooncake clients up, Redis with enough maxmemory), and kvfix (KVF007,
    KVF203), since in no release does vLLM forget the blocks of a failed load.
    """
    short = _missing(line)
    if not short or not log.counts["unretrievable"]:
        return None
    evicted = log.releases.within("lmcache", "<0.3.13")  # from then on the store is asked at the load too
    return Answer(short, verdict="unknown" if evicted else "violated")


@finding("KVD302", "load-comes-short", Severity.WRONG, on=["retrieved", "short", "load_failed"], symptom=True)
def load_comes_short(log: Diagnosis, line: LogLine) -> Answer | None:
    """What was hit could not be loaded. vLLM computes it again; what is stored meanwhile may be wrong.

    Cause: between lookup and load the chunks were evicted or their pins ran out, or the backend lost them. LMCache
    0.3.9 with --pipeline-parallel-size asks no rank of a later stage (pull 1813).

    First: `export LMCACHE_MAX_LOCAL_CPU_SIZE=GB`, a larger one (NIXL storage: `nixl_buffer_size`).
    """
    if line.name == "load_failed":
        return Answer(f"{line.fields['tokens']} tokens in {line.fields['blocks']} blocks were not loaded")
    missing = _missing(line)
    if not missing or log.counts["unretrievable"] or _between_segments(line):
        return None
    return Answer(missing)


@finding("KVD479", "hit-not-read", Severity.SLOW, on=[""])
def hit_not_read(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Chunks that a lookup had found could not be read when they were to be loaded.

    Cause: they were evicted meanwhile, the store does not give them (its own error stands before), or there was no room
    to read them into: the CPU pool, or with `enable_nixl_storage` the buffer of `nixl_buffer_size` bytes, which has to
    hold the KV of a whole prompt.

    Setting: `grep -n ERROR LOG` shows the errors of the store before these lines. NIXL storage: double
    `nixl_buffer_size`. Else a larger `max_local_cpu_size`; a remote store that keeps what it has (Redis:
    `maxmemory`); or `local_disk` on a disk of its own.
    """
    times = log.counts["unretrievable"]
    if not times or log.counts["short"] or log.counts["retrieved"]:
        return None
    return Answer(f"{times} times a chunk was found and could not be read", "", "unknown")


def _between_segments(line: LogLine) -> bool:
    """Whether what is missing are CacheBlend's separators: hit with the segments, and stored with none.

    It loads layer by layer, and such a load says `out of total`."""
    if line.name != "retrieved" or b"out of total" not in line.body:
        return False
    missing = int(line.fields["required"]) - int(line.fields["tokens"])
    return missing < _SEPARATORS and missing * 50 < int(line.fields["required"])


def _missing(line: LogLine) -> str:
    f = line.fields
    due = f["expected"] if line.name == "short" else f["required"]
    return f"{f['tokens']} of {due} tokens were loaded: {due - f['tokens']} are missing" if f["tokens"] < due else ""
