"""Findings about wrong or missing KV in an engine that keeps running."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


#: Maximum number of lines that a finding shows.
_SHOWN = 4


class _TakenForDone(list["LogLine"]):
    """Failed loads of a release that may report failed loads as done."""


@finding("KVD301", "failed-load-taken-for-done", Severity.WRONG, on=["mp_failed", ""])
def failed_load_taken_for_done(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A request returns wrong text: a load from the server failed, but LMCache reported the load as done.

    Setting: `lmcache server --l1-size-gb GB`, with a larger value, so that chunks are not evicted between lookup and
    load.
    """
    unsure = log.state(_TakenForDone)
    sentence = "the load of this request failed, but was reported as done"
    if line is None:  # if vLLM logs a failed load, this release reports failed loads
        if not unsure or log.counts["kv_failing"] or log.counts["kv_recovered"]:
            return None
        evidence = tuple(each.evidence for each in unsure)
        return Answer(f"{sentence} (if LMCache is older than 0.5.5)", unsure[0].request, "unknown", evidence)
    if line.fields["what"] != "retrieve" or log.releases.within("lmcache", ">=0.5.5"):
        return None
    if log.releases.within("lmcache", "<0.5.5"):
        return Answer(sentence)
    if len(unsure) < _SHOWN:
        unsure.append(line)
    return None


@finding(
    "KVD303",
    "load-failed-in-vllm",
    Severity.SLOW,
    on=["kv_failing", "kv_recovered"],
    symptom=True,
)
def load_failed_in_vllm(log: Diagnosis, line: LogLine) -> Answer | None:
    """Requests end with an error or are computed again: the connector reported failed loads.

    Cause: lines before this one show the cause: a failed handshake or transfer, a server or a peer that is gone, or
    chunks that were evicted after the lookup.

    First: `grep -n -B20 'KV load failure' LOG` shows the first failure. Fix this failure.

    Setting: `kv_load_failure_policy: recompute` computes these requests again. The default `fail` ends them.
    """
    f = line.fields
    if line.name == "kv_failing":
        return Answer(f"{f['objects']} requests with {f['tokens']} tokens ended with an error")
    return Answer(f"{f['objects']} requests are computed again ({f['tokens']} tokens)")


def _evicted_in_parts(line: LogLine) -> bool:
    """Return True if all ranks have a hit and the lengths differ. Then their hashes agree."""
    hits = {int(each) for each in re.findall(r"\d+", line.fields["results"])}
    return len(hits) > 1 and 0 not in hits


@finding("KVD304", "ranks-differ", Severity.WRONG, on=["ranks_differ"])
def ranks_differ(log: Diagnosis, line: LogLine) -> Answer | None:
    """Hits are lost, because the ranks of one engine find different hits for the same tokens.

    Cause: a rank that never hits hashes with its own seed (PYTHONHASHSEED). A rank that sometimes misses has lost
    chunks by eviction (KVD311). LMCache then uses the shortest hit, which is correct. On a decode instance with
    `enable_pd`, the first request that fetches chunks removes them. A second request with the same start finds chunks
    at some ranks only.

    Setting: `PYTHONHASHSEED=0` for every process, or `pre_caching_hash_algorithm: sha256_cbor`.

    Good: PYTHONHASHSEED=0 in every unit file and container, with LMCache 0.4.1 or newer. Older releases hash None,
    whose hash differs by process on Python 3.11 and older.
    """
    if _evicted_in_parts(line):
        return None
    settings = lookups_of(log).settings
    # The finding is certain only if the log has the configuration, and PD is off.
    without_pd = bool(settings) and all(settings.get(role, "None") == "None" for role in ("pd_role", "nixl_role"))
    return Answer(
        f"hit tokens by rank: {line.fields['results'][:80]}",
        verdict="violated" if without_pd else "unknown",
    )


@finding("KVD311", "ranks-evicted-apart", Severity.SLOW, on=["ranks_differ"])
def ranks_evicted_apart(log: Diagnosis, line: LogLine) -> Answer | None:
    """Hits are shorter than possible: the store holds more of a prompt for some ranks than for others.

    Cause: each rank stores its part of a chunk under its own key, and a store evicts key by key (Redis at maxmemory, or
    a full CPU cache). LMCache uses the shortest hit. All ranks have a hit, so PYTHONHASHSEED is not the cause.

    Setting: `redis-cli CONFIG SET maxmemory SIZE` with a larger SIZE, or a larger `max_local_cpu_size`. If the line is
    rare, do nothing.
    """
    if not _evicted_in_parts(line):
        return None
    return Answer(f"hit tokens by rank: {line.fields['results'][:80]}")


@finding("KVD306", "servers-differ", Severity.WRONG, on=["mp_servers_differ"])
def servers_differ(log: Diagnosis, line: LogLine) -> Answer | None:
    """Hits are shorter than possible: the cache servers of one engine hold different parts of a prompt.

    Cause: one server has evicted or lost chunks that other servers have. LMCache uses the shortest hit.

    Setting: `lmcache server --l1-size-gb GB`, with the same value for all servers.
    """
    return Answer("the servers found different hits")


@finding("KVD307", "save-left-out", Severity.SLOW, on=["save_skipped"])
def save_left_out(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request is not stored: LMCache's tracker has more or fewer tokens than vLLM has slots.

    Cause: after a failed load or a preemption, tracker and slots differ. From LMCache 0.4.7 on the worker skips the
    store and continues.

    Setting: `--gpu-memory-utilization` higher, or `--max-num-seqs` lower, so that vLLM preempts fewer requests.
    """
    f = line.fields
    return Answer(f"not stored: {f['ids']} token ids, but {f['slots']} slots")


@finding("KVD308", "preempted-while-stored", Severity.RISK, on=["mp_preempted"])
def preempted_while_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server may store wrong KV under valid keys, without an error: it copies blocks of preempted requests.

    Setting: `--num-gpu-blocks-override` or `--gpu-memory-utilization` higher, so that vLLM preempts no request.
    """
    if line.fields["what"] != "preempted" or log.releases.within("lmcache", ">=0.5.2,<0.5.6") is not True:
        return None
    return Answer("requests were preempted, and this LMCache does not wait for stores in flight")


@finding("KVD309", "block-ids-missing", Severity.WRONG, on=["underflow"])
def block_ids_missing(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server skipped a transfer, because it got fewer blocks than the chunks need.

    Cause: connector and server count blocks differently, because their block sizes, chunk sizes or releases differ.

    Setting: `pip show lmcache` on both sides must show the same release. Start `lmcache server --chunk-size N` with a
    multiple of vLLM's block size.
    """
    return Answer(f"{line.fields['what']} was skipped: too few block ids")


@finding("KVD310", "keys-lost", Severity.SLOW, on=["keys_missing"])
def keys_lost(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load fails, because the server has lost chunks that its lookup had found.

    Cause: the read locks of the chunks timed out, and the chunks were evicted between lookup and load. With an MLA
    model and tensor parallelism before LMCache 0.4.1, the first rank that loads releases the locks of all ranks.

    Setting: `lmcache server --l1-size-gb GB`, with a larger value.
    """
    return Answer("keys that the lookup had found were not found at the load")


#: All CacheBlend separators of a prompt together have fewer tokens than this.
_SEPARATORS = 64


@finding("KVD1090", "store-does-not-give-what-it-lists", Severity.WRONG, on=["retrieved", "short"])
def store_does_not_give_what_it_lists(log: Diagnosis, line: LogLine) -> Answer | None:
    """A load brings fewer tokens than the lookup found: the store lists chunks, but does not return them.

    Cause: the store lists the chunk, but returned nothing at the load (cache_engine.py, `The cache block is in the
    storage, but it can't be retrieved`). Mooncake: the master still lists chunks of a client that is gone. Redis: the
    header exists, but the data was evicted, or the client timed out. S3: a lifecycle rule or another writer deleted the
    object, which LMCache lists until vLLM restarts (pull 4745). Disk: the file is gone. Every store: the CPU pool has
    no room for the chunk. Then the log has a line about this. LMCache 0.3.9 to 0.3.12 with a single backend: the chunk
    was evicted from CPU memory (raise `max_local_cpu_size`).

    First: `grep -n -B20 "can't be retrieved" LOG` shows the error of the store. This error decides which cause applies.
    Without an error, clear the list of the store: restart mooncake_master, run `redis-cli FLUSHDB`, or empty the folder
    of local_disk. Then restart vLLM.

    Good: a store that keeps all chunks that it lists (all Mooncake clients up, Redis with enough maxmemory), and kvfix
    (KVF007, KVF203). No release of vLLM removes the blocks of a failed load from its cache.
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
