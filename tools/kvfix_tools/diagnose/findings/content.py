"""The engine runs on, and the KV is not what it should be; or it may not be."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


#: Lines that a finding shows.
_SHOWN = 4


class _TakenForDone(list["LogLine"]):
    """Failed loads of a release that may report them as done."""


@finding("KVD301", "failed-load-taken-for-done", Severity.WRONG, on=["mp_failed", ""])
def failed_load_taken_for_done(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A load from the server failed and was reported done: the request reads what lies in its blocks. Wrong text.

    Setting: `lmcache server --l1-size-gb` larger, so that chunks are not evicted between lookup and load.
    """
    unsure = log.state(_TakenForDone)
    sentence = "its load failed, and is reported as done"
    if line is None:  # where vLLM knows of a load that failed, the release reports it
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
    """The connector reported blocks whose load failed.

    Cause: lines before this one tell why: a handshake or a transfer that failed, a server or a peer that is gone,
    chunks that were evicted after the lookup.

    First: `grep -n -B20 'KV load failure' LOG` shows what failed before it: put that right.

    Setting: `kv_load_failure_policy: recompute` computes them again; `fail`, the default, ends the requests.
    """
    f = line.fields
    if line.name == "kv_failing":
        return Answer(f"{f['objects']} requests were ended with an error, {f['tokens']} tokens", request="")
    return Answer(f"{f['objects']} requests are computed again, {f['tokens']} tokens", request="")


def _evicted_in_parts(line: LogLine) -> bool:
    """Some ranks have a shorter hit than others, and all have one: their hashes agree, or none would hit."""
    hits = {int(each) for each in re.findall(r"\d+", line.fields["results"])}
    return len(hits) > 1 and 0 not in hits


@finding("KVD304", "ranks-differ", Severity.WRONG, on=["ranks_differ"])
def ranks_differ(log: Diagnosis, line: LogLine) -> Answer | None:
    """The ranks of one engine find different hits for the same tokens.

    Cause: a rank that never hits hashes with a seed of its own (PYTHONHASHSEED). One that misses now and then: the
    store has evicted its part of the chunks (KVD311); the least hit is taken, and nothing is wrong. A decoder with PD:
    chunks go with the first request that fetched them, so that another with the same start finds some at some ranks.

    Setting: `PYTHONHASHSEED=0` for every process; `pre_caching_hash_algorithm: sha256_cbor`.

    Good: the same, for good; LMCache 0.4.1 or newer (older ones hash None, which differs on Python 3.11 and older).
    """
    if _evicted_in_parts(line):
        return None
    settings = lookups_of(log).settings
    # Certain only where the configuration is in the log and has no PD.
    without_pd = bool(settings) and all(settings.get(role, "None") == "None" for role in ("pd_role", "nixl_role"))
    return Answer(
        f"hit tokens by rank: {line.fields['results'][:80]}",
        request="",
        verdict="violated" if without_pd else "unknown",
    )


@finding("KVD311", "ranks-evicted-apart", Severity.SLOW, on=["ranks_differ"])
def ranks_evicted_apart(log: Diagnosis, line: LogLine) -> Answer | None:
    """The store holds more of a prompt for some ranks than for others; the least is taken.

    Cause: each rank keeps its part of a chunk under its own key, and a store evicts key by key (Redis at its maxmemory,
    or a full CPU cache). All ranks hit, so their hashes agree: PYTHONHASHSEED is not the cause.

    Setting: `redis-cli CONFIG SET maxmemory SIZE` larger, or a larger `max_local_cpu_size`; nothing if it is rare.
    """
    if not _evicted_in_parts(line):
        return None
    return Answer(f"hit tokens by rank: {line.fields['results'][:80]}", request="")


@finding("KVD306", "servers-differ", Severity.WRONG, on=["mp_servers_differ"])
def servers_differ(log: Diagnosis, line: LogLine) -> Answer | None:
    """The cache servers of one engine hold different parts of a prompt; the least is taken.

    Cause: one of them has evicted or lost what the others have.

    Setting: `lmcache server --l1-size-gb` the same for all servers.
    """
    return Answer("the servers found different hits")


@finding("KVD307", "save-left-out", Severity.SLOW, on=["save_skipped"])
def save_left_out(log: Diagnosis, line: LogLine) -> Answer | None:
    """A save was left out, since the tracker counts other tokens than vLLM has slots for.

    Cause: the two came apart after a failed load or a preemption; from 0.4.7 on the worker goes on.

    Setting: `--gpu-memory-utilization` higher or `--max-num-seqs` lower, so that fewer requests are preempted.
    """
    f = line.fields
    return Answer(f"{f['ids']} token ids and {f['slots']} slots: not stored")


@finding("KVD308", "preempted-while-stored", Severity.RISK, on=["mp_preempted"])
def preempted_while_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    """Requests are preempted while the server may still copy their blocks: wrong KV under valid keys, silently.

    Setting: more KV blocks, so that nothing is preempted.
    """
    if line.fields["what"] != "preempted" or log.releases.within("lmcache", ">=0.5.2,<0.5.6") is not True:
        return None
    return Answer("preempted, and this LMCache does not wait for stores in flight", request="")


@finding("KVD309", "block-ids-missing", Severity.WRONG, on=["underflow"])
def block_ids_missing(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server was given fewer blocks than the chunks need, and left the transfer out.

    Cause: connector and server count blocks differently: other block or chunk sizes, or another release.

    Setting: `pip show lmcache` on both sides: the same release; `lmcache server --chunk-size` a multiple of vLLM's
    block size.
    """
    return Answer(f"{line.fields['what']}: too few block ids, left out")


@finding("KVD310", "keys-lost", Severity.SLOW, on=["keys_missing"])
def keys_lost(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server no longer has what it had reported: the load fails.

    Cause: the chunks were evicted between lookup and load, their read locks having run out; with an MLA model and
    tensor parallelism before LMCache 0.4.1 the first rank that loads releases them for all.

    Setting: `lmcache server --l1-size-gb GB`, a larger one.
    """
    return Answer("keys were not found when they were to be loaded", request="")
