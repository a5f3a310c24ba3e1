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
        return Answer(f"{f['objects']} requests with {f['tokens']} tokens ended with an error", request="")
    return Answer(f"{f['objects']} requests are computed again ({f['tokens']} tokens)", request="")


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
        request="",
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
    return Answer(f"hit tokens by rank: {line.fields['results'][:80]}", request="")


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
    return Answer("requests were preempted, and this LMCache does not wait for stores in flight", request="")


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
    return Answer("keys that the lookup had found were not found at the load", request="")
