"""Lookups without a hit in a log of a few lines, as people paste it: never certain, and the last to be reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import CHUNK, ENOUGH, by_layers, lookups_of
from kvfix_tools.diagnose.findings.pastes import is_lossy, is_one_process, is_paste, is_short

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


@finding("KVD008", "pd-receiver-finds-nothing", Severity.SLOW, on=[""])
def pd_receiver_finds_nothing(log: Diagnosis, line: LogLine) -> Answer | None:
    """A decoder with LMCache's PD found nothing of what prefill should have sent, and computes the prompts itself.

    Cause: in this order. PYTHONHASHSEED is not set on both sides: what arrives has other keys than what is looked for.
    Prefill sent nothing or to another decoder: the request came past the proxy, or its `disagg_spec` names another
    host or port. Decode asked before the last chunk had come: a proxy that does not wait for prefill's notification.
    Only long prompts: they do not fit in the receiver's buffer. Else the two sides cut the prompt differently
    (`chunk_size`, `save_unfull_chunk`, another chat template).

    First: prefill's log of the same request: `Stored` with all its tokens, and no error of the transfer.

    Setting: `export PYTHONHASHSEED=0` on prefill and decode; `pd_buffer_size` (before 0.3.7 `nixl_buffer_size`) larger
    than the longest prompt, the same `chunk_size` and `save_unfull_chunk: true` on both; requests only to the proxy.

    Good: the same, in every unit file and container.

    Normal: a request that is sent to the decoder itself.
    """
    kept = lookups_of(log)
    role = kept.settings.get("pd_role", "None")
    if (role if role != "None" else kept.settings.get("nixl_role")) != "receiver":
        return None
    if not 0 < kept.number < ENOUGH or not is_paste(log):
        return None
    return Answer(
        f"{kept.number} lookup{'s' if kept.number > 1 else ''} of up to {kept.longest} tokens, 0 hits, on a receiver",
        request="",
        verdict="unknown",
    )


@finding("KVD327", "no-hit-in-a-paste", Severity.RISK, on=[""])
def no_hit_in_a_paste(log: Diagnosis, line: LogLine) -> Answer | None:
    """A few lookups, none of which finds anything: too few to tell why.

    Cause: in this order. A prompt is found from its second request on, and after a restart from its second on again:
    files of `local_disk` are not read at a start. One of fewer tokens than `chunk_size` (256) is not stored from 0.3.11
    on (`save_unfull_chunk` is false). Else the processes hash differently: PYTHONHASHSEED is not set, so what a worker
    or another engine stored is not found; up to 0.3.15 on Python 3.11 and older not even with it.

    Setting: `export PYTHONHASHSEED=0` before every vLLM process (each engine, and the controller) or
    `pre_caching_hash_algorithm: sha256_cbor` (LMCache 0.4.6 or newer), restart; then a prompt of more than
    `chunk_size` tokens, sent twice. What is to outlive a restart: `remote_url: fs://host:0/DIR`, not `local_disk`.

    Good: the same, in every unit file and container; LMCache 0.4.1 or newer.

    Normal: the first request with each prompt.
    """
    kept = lookups_of(log)
    if not 0 < kept.number < ENOUGH or not is_paste(log) or kept.ahead >= (kept.chunk or CHUNK):
        return None
    twice = kept.twice
    short = kept.longest < (kept.chunk or CHUNK)
    what = f"{kept.number} lookup{'s' if kept.number > 1 else ''} of up to {kept.longest} tokens, 0 hits"
    if twice and kept.stored and is_one_process(kept):
        return None
    if twice and kept.stored:
        sentence = f"{what}; prompts of {twice} tokens came twice, and were stored"
        return Answer(sentence, request="", verdict="unknown", record=by_layers(log))
    if short and (twice or not kept.stored):
        chunk = f"a chunk has {kept.chunk}" if kept.chunk else f"a chunk has {CHUNK} by default"
        return Answer(f"{what}; {chunk}", request="", verdict="unknown")
    return Answer(what, request="", verdict="unknown") if twice else None


@finding("KVD328", "shared-without-a-seed", Severity.SLOW, on=[""])
def shared_without_a_seed(log: Diagnosis, line: LogLine) -> Answer | None:
    """A store is shared, PYTHONHASHSEED is not set, and nothing is found: each process hashes with a number of its own.

    Cause: without PYTHONHASHSEED what one process has stored another does not find: LMCache says so at its start.

    Setting: `export PYTHONHASHSEED=0` before every vLLM process (each engine, and the controller), and restart; or
    `pre_caching_hash_algorithm: sha256_cbor`.

    Good: the same, in every unit file and container; LMCache 0.4.1 or newer.

    Normal: the first request with each prompt.
    """
    kept = lookups_of(log)
    if not 0 < kept.number < ENOUGH or not is_paste(log) or not (kept.shared and log.counts["hash_seed"]):
        return None
    return Answer(f"{kept.number} lookups, 0 hits in a shared store, no PYTHONHASHSEED", request="", verdict="unknown")


@finding("KVD329", "peers-unknown-in-a-paste", Severity.SLOW, on=[""])
def peers_unknown_in_a_paste(log: Diagnosis, line: LogLine) -> Answer | None:
    """The controller knew of no peer that has what was looked for, as far as these few lines show.

    Cause: the peers announce nothing (`local_cpu: false`, or no connection to the controller), hash differently
    (PYTHONHASHSEED not the same in the engines and the controller), or have not stored it yet.

    Setting: `local_cpu: true`, `enable_async_loading: true` and `PYTHONHASHSEED=0` in each engine and the controller,
    restart; then a prompt of more than `chunk_size` tokens, first to one engine, then to the other.

    Good: the same, in every unit file and container; nothing in LMCache's code differs up to 0.5.6.

    Normal: one such line for each miss; a filled answer names the peer.
    """
    kept = lookups_of(log)
    few = kept.number < ENOUGH or kept.empty < ENOUGH
    if not kept.empty or log.counts["peer_asked"] > kept.empty or not few or not is_paste(log):
        return None
    return Answer(f"the controller was asked {kept.empty} times and knew no peer", request="", verdict="unknown")


@finding("KVD424", "pd-without-hash-seed", Severity.RISK, on=["hash_seed"])
def pd_without_hash_seed(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCache's PD mode runs without PYTHONHASHSEED: decode may not find what prefill sends.

    Cause: each process begins its hashes with a random number, so the keys under which prefill sends its chunks are not
    those for which decode looks: no hit, and the receiver's buffer fills up.

    Setting: `export PYTHONHASHSEED=0` before `vllm serve` on prefill and on decode, and restart both; or
    `pre_caching_hash_algorithm: sha256_cbor` on both.

    Good: the same, in every unit file and container; LMCache 0.4.1 or newer on Python 3.11 and older.

    Normal: the line comes with every hash algorithm.
    """
    if not line.fields["why"].startswith("P/D"):
        return None
    return Answer("enable_pd, and PYTHONHASHSEED is not set", request="", verdict="unknown")


@note("lookup_timeout")
def _note_timeout(log: Diagnosis, line: LogLine) -> None:
    log.memory["lookup_timeout"] = (line.fields["rank"], line.evidence)


@finding("KVD430", "lookup-unanswered-in-a-paste", Severity.SLOW, on=[""])
def lookup_unanswered_in_a_paste(log: Diagnosis, line: LogLine) -> Answer | None:
    """A worker did not answer a lookup, as far as these few lines show.

    Cause: in this order. The rank runs on another node: lookups go over sockets of one machine (`ipc://`), so a rank
    elsewhere never answers, and every step waits `lookup_timeout_ms` (3 s). LMCache has not started in that worker: its
    first ERROR says why (KVD207). The worker is busy with a long load or store: then it is a few lookups only.

    Setting: ranks on several nodes: `lookup_server_worker_ids: [0]` (`LMCACHE_LOOKUP_SERVER_WORKER_IDS=0`), which asks
    rank 0 alone, and `lookup_timeout_ms: 500`, restart; one node: a longer `lookup_timeout_ms`.

    Good: several nodes: LMCacheMPConnector, with an `lmcache server` on each node.

    Normal: one such line in a long log.
    """
    few = 0 < log.counts["lookup_timeout"] < 3
    if not few or not is_short(log):
        return None
    rank, evidence = log.memory["lookup_timeout"]
    return Answer(f"rank {rank} did not answer", request="", verdict="unknown", evidence=(evidence,))


@finding("KVD431", "vllm-has-it-already", Severity.RISK, on=[""])
def vllm_has_it_already(log: Diagnosis, line: LogLine) -> Answer | None:
    """Every hit is one that vLLM's own prefix cache has as well: LMCache has nothing to load, and saves no time.

    Cause: the cache on the GPU is asked first; LMCache loads only what goes beyond (`need to load`, below 0 where vLLM
    has more, as its blocks are smaller than chunks). What a benchmark then measures is the cost of the lookup. Answers
    that get worse on a hit are another matter (`remote_serde: cachegen` loses precision).

    Setting: to see what LMCache saves: more distinct prompts than the GPU holds, `--no-enable-prefix-caching`, or the
    same prompt after a restart or on another engine; in production nothing is to be done.

    Good: nothing has to change for LMCache's sake; where answers get worse after hits, `remote_serde: naive`.

    Normal: a prompt that is repeated while it is on the GPU.
    """
    kept = lookups_of(log)
    if is_lossy(log):
        return None
    all_doubled = kept.hits and kept.doubled == kept.hits and not kept.below
    if not all_doubled or kept.missing >= (kept.chunk or CHUNK) or not is_short(log):
        return None
    beyond = f"all but {kept.missing} tokens" if kept.missing > 0 else "all"
    what = f"{kept.hits} hit{'s' if kept.hits > 1 else ''}, of which vLLM itself had {beyond}"
    return Answer(what, request="", verdict="unknown")


@finding("KVD432", "vllm-has-more-than-lmcache", Severity.SLOW, on=[""])
def vllm_has_more_than_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    """vLLM's own cache holds whole chunks of a prompt of which LMCache finds nothing.

    Cause: in this order. LMCache has evicted them: `max_local_cpu_size` is smaller than the prompts between two uses (a
    benchmark that goes round over more prompts than fit hits nothing at all). LMCache before 0.3.9 leaks its pool, and
    stores less and less. The processes hash differently: no PYTHONHASHSEED, and tensor parallelism or several engines.

    Setting: `export PYTHONHASHSEED=0`, a `max_local_cpu_size` (GB for each worker) above tokens of all prompts times
    bytes of KV per token, LMCache 0.4.1 or newer; restart.

    Good: the same settings, and LMCache 0.4.1 or newer.

    Normal: the first use of a prompt whose beginning vLLM has computed in this very step.
    """
    kept = lookups_of(log)
    if kept.ahead < (kept.chunk or CHUNK) or not is_paste(log):
        return None
    what = f"{kept.number} lookup{'s' if kept.number > 1 else ''}, 0 hits; vLLM itself had up to {kept.ahead} tokens"
    return Answer(what, request="", verdict="unknown")


@note("logged")
def _note_without_file(log: Diagnosis, line: LogLine) -> None:
    if b"o LMCache configuration file is set" in line.body[:80]:
        log.memory.setdefault("without_file", line.evidence)


@finding("KVD996", "runs-with-its-defaults", Severity.RISK, on=[""])
def runs_with_its_defaults(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCache was given no configuration file: what stands in one has no effect.

    Cause: the variable LMCACHE_CONFIG_FILE is not in the environment of vLLM's processes. Set without `export` in a
    line of its own, in another shell, or outside of the container (`docker run -e`, `env:` of the pod) it does not get
    there. Without it only LMCACHE_... variables count, else the defaults: chunks of 256 tokens, 5 GB of CPU memory, no
    disk, no remote store.

    Setting: `export LMCACHE_CONFIG_FILE=/path/in/the/container/lmcache.yaml` before `vllm serve`, and restart; the line
    `LMCache Configuration:` must show the file's values.

    Normal: an engine that is configured by LMCACHE_... variables alone, or not at all.
    """
    evidence = log.memory.get("without_file")
    settings = lookups_of(log).settings
    plain = settings.get("local_disk", "None") == "None" and settings.get("remote_url", "None") == "None"
    if evidence is None or not plain or log.counts["asked"] or log.failures.dead or not is_short(log):
        return None
    return Answer("no LMCACHE_CONFIG_FILE in this process", request="", verdict="unknown", evidence=(evidence,))
