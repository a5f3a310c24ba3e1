"""Lookups that find nothing, from ten on: each only where the log shows why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups_seen import CHUNK, ENOUGH, Lookups, lookups_by_file, lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


def _never(log: Diagnosis) -> Lookups | None:
    """The lookups, if there are enough of them and none found anything."""
    kept = lookups_of(log)
    return kept if kept.number >= ENOUGH and not log.hit else None


@finding("KVD305", "never-a-hit", Severity.SLOW, on=[""])
def never_a_hit(log: Diagnosis, line: LogLine) -> Answer | None:
    """Tokens are stored, and never found again: the processes hash them differently.

    Cause: PYTHONHASHSEED is not set, so each process begins its hashes with a number of its own: what a worker has
    stored the scheduler does not find (tensor parallelism), nor another engine (remote store, P2P, PD). Up to 0.3.15
    on Python 3.11 and older not even the seed helps: None is hashed, by its address.

    Setting: `export PYTHONHASHSEED=0` before every vLLM process (each engine, and the controller), and restart; or
    `pre_caching_hash_algorithm: sha256_cbor`.

    Good: the same, in every unit file and container; LMCache 0.4.1 or newer.

    Normal: the first request with each prompt. Prompts that never begin alike have no hits whatever the seed.
    """
    kept, files = _never(log), lookups_by_file(log)
    if kept is not None:
        return _hashed_differently(kept)
    for file, each in files.items() if len(files) > 1 else ():
        answer = _hashed_differently(each) if each.number >= ENOUGH and not each.hits else None
        if answer is not None:
            return answer._replace(sentence=f"{answer.sentence}, in {file}")
    return None


def _hashed_differently(kept: Lookups) -> Answer | None:
    """The answer for lookups that never hit; None if nothing shows that the processes hash differently."""
    if not kept.stored or not kept.unseeded:
        return None
    apart = bool(kept.storers - kept.askers) or len(kept.askers) > 1
    lost = kept.local >= (kept.chunk or CHUNK)
    if not (apart or lost or kept.shared or kept.number >= 100):
        return None
    why = f"; vLLM's own prefix cache had up to {kept.local} tokens of them" if lost else ""
    return Answer(
        f"{kept.number} lookups, {kept.stored} stores, 0 hits, and PYTHONHASHSEED is not set{why}",
        request="",
        verdict="violated" if apart or lost else "unknown",
    )


@finding("KVD320", "prompts-below-a-chunk", Severity.NOTE, on=[""])
def prompts_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    """No prompt is as long as a chunk: nothing is stored, and nothing can be found.

    Cause: LMCache stores whole chunks. From 0.3.11 on `save_unfull_chunk` is false by default, and what is shorter than
    `chunk_size` tokens is left out.

    Setting: `export LMCACHE_CHUNK_SIZE=64`, a smaller chunk and a multiple of vLLM's block size; or test with
    prompts of more than `chunk_size` tokens, each sent twice.
    """
    kept = _never(log)
    chunk = kept.chunk or CHUNK if kept else 0
    if kept is None or kept.stored or kept.longest >= chunk:
        return None
    return Answer(
        f"{kept.number} lookups, the longest of {kept.longest} tokens, no stores, 0 hits; a chunk has {chunk} tokens"
        + ("" if kept.chunk else ", if chunk_size is the default"),
        request="",
        verdict="violated" if kept.chunk else "unknown",
    )


@finding("KVD321", "nothing-stored", Severity.SLOW, on=[""])
def nothing_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    """Lookups find nothing, and nothing is stored.

    Cause: an engine with `kv_role: kv_consumer` never stores: what it finds must come from a producer. Otherwise the
    stores fail or are left out (a worker without LMCache, a health check, a full CPU cache: other lines tell), or the
    log of the workers is not here.

    Setting: `"kv_role": "kv_both"` in --kv-transfer-config, unless a producer writes into the same store; and the
    workers' part of the log.
    """
    kept = _never(log)
    if kept is None or kept.stored or kept.longest < (kept.chunk or CHUNK):
        return None
    consumer = log.who.roles == {"kv_consumer"}
    return Answer(
        f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits"
        + ("; kv_role is kv_consumer, which does not store" if consumer else ""),
        request="",
        verdict="violated" if consumer else "unknown",
    )


@finding("KVD322", "shared-prefix-below-a-chunk", Severity.NOTE, on=[""])
def shared_prefix_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    """What prompts have in common is shorter than a chunk: vLLM's own prefix cache finds it, LMCache cannot.

    Cause: LMCache compares whole chunks from the beginning of the prompt, vLLM whole blocks.

    Setting: `export LMCACHE_CHUNK_SIZE=64`, a smaller chunk and a multiple of vLLM's block size; it costs more
    keys.
    """
    kept = _never(log)
    if kept is None or not kept.stored or not kept.chunk or not 0 < kept.local < kept.chunk:
        return None
    return Answer(
        f"{kept.number} lookups, {kept.stored} stores, 0 hits; vLLM itself had at most {kept.local} tokens of a "
        f"prompt, and a chunk has {kept.chunk}",
        request="",
    )


@finding("KVD323", "below-the-minimum", Severity.SLOW, on=[""])
def below_the_minimum(log: Diagnosis, line: LogLine) -> Answer | None:
    """Hits are found, and none is loaded: all are below `min_retrieve_tokens`.

    Cause: what is left to load after vLLM's own prefix cache is less than the minimum that is configured.

    Setting: `export LMCACHE_MIN_RETRIEVE_TOKENS=0`, or a smaller number.
    """
    kept = lookups_of(log)
    if kept.below < ENOUGH or kept.loads or log.counts["retrieved"]:
        return None
    return Answer(
        f"{kept.below} lookups hit up to {kept.most} tokens, and none was loaded: the minimum is {kept.least}",
        request="",
    )


@finding("KVD324", "peers-without-async-loading", Severity.SLOW, on=[""])
def peers_without_async_loading(log: Diagnosis, line: LogLine) -> Answer | None:
    """P2P sharing is on, and asynchronous loading is off: a peer is never asked.

    Cause: the P2P backend answers the plain lookup with no, always (p2p_backend.py, `contains`, 0.3.9 to 0.5.6); only
    the asynchronous one asks the controller.

    Setting: `enable_async_loading: true` in each engine.
    """
    kept = _never(log)
    if kept is None or kept.settings.get("enable_p2p") != "True":
        return None
    if kept.settings.get("enable_async_loading") != "False":
        return None
    return Answer(f"{kept.number} lookups, 0 hits; enable_p2p is True, enable_async_loading is False", request="")


@finding("KVD325", "peers-have-nothing", Severity.SLOW, on=[""])
def peers_have_nothing(log: Diagnosis, line: LogLine) -> Answer | None:
    """The controller knows of no peer that has what is looked for.

    Cause: the peers announce nothing (`local_cpu: false`, or no connection to the controller), hash differently
    (PYTHONHASHSEED not the same in both), or have not stored it yet.

    Setting: `local_cpu: true`, `enable_async_loading: true` and `PYTHONHASHSEED=0` in each engine; then a prompt of
    more than `chunk_size` tokens, first to one engine, then to the other.

    Normal: one such line for each miss; a filled answer names the peer.
    """
    kept = _never(log)
    if kept is None or kept.empty < ENOUGH or log.counts["peer_asked"] > kept.empty:
        return None
    alone = kept.settings.get("local_cpu") == "False"
    return Answer(
        f"{kept.number} lookups, 0 hits; the controller was asked {kept.empty} times and knew no peer"
        + ("; local_cpu is False, so nothing is announced" if alone else ""),
        request="",
        verdict="violated" if alone else "unknown",
    )


@finding("KVD326", "engines-with-different-keys", Severity.SLOW, on=[""])
def engines_with_different_keys(log: Diagnosis, line: LogLine) -> Answer | None:
    """Engines that share a store name their chunks differently: none finds what another has stored.

    Cause: a key has the model's name as it was given to --model, the number of ranks, the rank, the dtype of the KV and
    the hash of a chunk of `chunk_size` tokens. One that differs makes another key.

    Setting: `vllm serve MODEL --tensor-parallel-size N --kv-cache-dtype TYPE` and `chunk_size` the same in each
    engine, MODEL by the same path.
    """
    kept = _never(log)
    if kept is None or not kept.shared or len(kept.engines) < 2:
        return None
    names = ("model", "ranks", "dtype", "chunk size")
    differ = [
        f"{name} {' and '.join(values)}"
        for name, values in zip(names, (sorted(set(each)) for each in zip(*kept.engines, strict=True)), strict=True)
        if len(values) > 1
    ]
    return Answer(
        f"{kept.number} lookups, 0 hits in a shared store; the engines differ: {'; '.join(differ)[:300]}",
        request="",
        evidence=tuple(each.evidence for each in kept.engines.values())[:4],
    )
