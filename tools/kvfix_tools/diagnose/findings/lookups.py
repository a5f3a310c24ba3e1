"""Findings about at least ten lookups without a hit, if the log shows the cause."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import CHUNK, ENOUGH, Lookups, LookupsByFile, lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


def _never(log: Diagnosis) -> Lookups | None:
    """Return the lookups if there are enough of them and none has a hit; else None."""
    kept = lookups_of(log)
    return kept if kept.number >= ENOUGH and not kept.hit else None


@finding("KVD305", "never-a-hit", Severity.SLOW, on=[""])
def never_a_hit(log: Diagnosis, line: LogLine) -> Answer | None:
    """No lookup has a hit, although chunks are stored: the processes hash tokens differently.

    Cause: PYTHONHASHSEED is not set, so each process hashes with a random seed. The scheduler does not find the chunks
    of a worker (tensor parallelism), and an engine does not find the chunks of another engine (remote store, P2P, PD).
    Up to LMCache 0.3.15 on Python 3.11 and older, a seed does not help, because None is hashed by its address.

    Setting: `export PYTHONHASHSEED=0` before every vLLM process (each engine, and the controller), and restart. Or set
    `pre_caching_hash_algorithm: sha256_cbor`.

    Good: PYTHONHASHSEED=0 in every unit file and container, with LMCache 0.4.1 or newer.

    Normal: the first request with each prompt, and prompts without a common beginning.
    """
    kept, files = _never(log), log.state(LookupsByFile)
    if kept is not None:
        return _hashed_differently(kept)
    for file, each in files.items() if len(files) > 1 else ():
        answer = _hashed_differently(each) if each.number >= ENOUGH and not each.hit else None
        if answer is not None:
            return answer._replace(sentence=f"{answer.sentence}, in {file}")
    return None


def _hashed_differently(kept: Lookups) -> Answer | None:
    """Return the answer for lookups without a hit; None if nothing shows that the processes hash differently."""
    if not kept.stored or not kept.unseeded:
        return None
    apart = bool(kept.storers - kept.askers) or len(kept.askers) > 1
    lost = kept.local >= (kept.chunk or CHUNK)
    if not (apart or lost or kept.shared or kept.number >= 100):
        return None
    why = f"; vLLM's own prefix cache had up to {kept.local} tokens of these prompts" if lost else ""
    return Answer(
        f"{kept.number} lookups, {kept.stored} stores, 0 hits, and PYTHONHASHSEED is not set{why}",
        verdict="violated" if apart or lost else "unknown",
    )


@finding("KVD320", "prompts-below-a-chunk", Severity.NOTE, on=[""])
def prompts_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    """Nothing is stored and no lookup has a hit, because every prompt is shorter than a chunk.

    Cause: LMCache stores whole chunks. From 0.3.11 on `save_unfull_chunk` is false by default, and LMCache does not
    store a prompt that is shorter than `chunk_size` tokens.

    Setting: `export LMCACHE_CHUNK_SIZE=64`, or another small multiple of vLLM's block size. For a test, send prompts of
    more than `chunk_size` tokens twice.
    """
    kept = _never(log)
    chunk = kept.chunk or CHUNK if kept else 0
    if kept is None or kept.stored or kept.longest >= chunk:
        return None
    return Answer(
        f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits; a chunk has {chunk} tokens"
        + ("" if kept.chunk else ", if chunk_size is the default"),
        verdict="violated" if kept.chunk else "unknown",
    )


@finding("KVD321", "nothing-stored", Severity.SLOW, on=[""])
def nothing_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    """No lookup has a hit, because nothing is stored.

    Cause: an engine with `kv_role: kv_consumer` never stores, and needs a producer. Otherwise the stores fail: a worker
    runs without LMCache, a health check failed, or the CPU cache is full. Other lines of the log show this. Another
    possible cause: this log does not have the workers' lines.

    Setting: `"kv_role": "kv_both"` in --kv-transfer-config, unless a producer writes into the same store. Then run
    kvfix-diagnose with the workers' logs too.
    """
    kept = _never(log)
    if kept is None or kept.stored or kept.longest < (kept.chunk or CHUNK):
        return None
    consumer = log.who.roles == {"kv_consumer"}
    return Answer(
        f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits"
        + ("; kv_role is kv_consumer, which does not store" if consumer else ""),
        verdict="violated" if consumer else "unknown",
    )


@finding("KVD322", "shared-prefix-below-a-chunk", Severity.NOTE, on=[""])
def shared_prefix_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    """No lookup has a hit, because the common beginning of the prompts is shorter than a chunk.

    Cause: LMCache compares whole chunks from the beginning of the prompt. vLLM's own prefix cache compares blocks,
    which are smaller.

    Setting: `export LMCACHE_CHUNK_SIZE=64`, or another small multiple of vLLM's block size. Smaller chunks need more
    keys.
    """
    kept = _never(log)
    if kept is None or not kept.stored or not kept.chunk or not 0 < kept.local < kept.chunk:
        return None
    return Answer(
        f"{kept.number} lookups, {kept.stored} stores, 0 hits; vLLM itself had at most {kept.local} tokens of a "
        f"prompt, and a chunk has {kept.chunk} tokens",
    )


@finding("KVD323", "below-the-minimum", Severity.SLOW, on=[""])
def below_the_minimum(log: Diagnosis, line: LogLine) -> Answer | None:
    """Lookups have hits, but no KV is loaded, because all hits are below `min_retrieve_tokens`.

    Cause: the tokens to load beyond vLLM's own prefix hit are fewer than `min_retrieve_tokens`.

    Setting: `export LMCACHE_MIN_RETRIEVE_TOKENS=0`, or a smaller number.
    """
    kept = lookups_of(log)
    if kept.below < ENOUGH or kept.loads or log.counts["retrieved"]:
        return None
    return Answer(
        f"{kept.below} lookups hit up to {kept.most} tokens, but loaded none: min_retrieve_tokens is {kept.least}",
    )


@finding("KVD324", "peers-without-async-loading", Severity.SLOW, on=[""])
def peers_without_async_loading(log: Diagnosis, line: LogLine) -> Answer | None:
    """No chunk is loaded from a peer: P2P sharing needs asynchronous loading, which is off.

    Cause: the P2P backend never reports a hit to a synchronous lookup (p2p_backend.py, `contains`, 0.3.9 to 0.5.6).
    Only the asynchronous lookup asks the controller.

    Setting: `enable_async_loading: true` in each engine.
    """
    kept = _never(log)
    if kept is None or kept.settings.get("enable_p2p") != "True":
        return None
    if kept.settings.get("enable_async_loading") != "False":
        return None
    return Answer(f"{kept.number} lookups, 0 hits; enable_p2p is True, enable_async_loading is False")


@finding("KVD325", "peers-have-nothing", Severity.SLOW, on=[""])
def peers_have_nothing(log: Diagnosis, line: LogLine) -> Answer | None:
    """No chunk is loaded from a peer: the controller knows no peer with the chunks.

    Cause: the peers announce no chunks (`local_cpu: false`, or no connection to the controller), hash differently
    (PYTHONHASHSEED differs), or have not stored the chunks yet.

    Setting: `local_cpu: true`, `enable_async_loading: true` and `PYTHONHASHSEED=0` in each engine. To test, send a
    prompt of more than `chunk_size` tokens to one engine, then to the other.

    Normal: one line in the log for each miss.
    """
    kept = _never(log)
    if kept is None or kept.empty < ENOUGH or log.counts["peer_asked"] > kept.empty:
        return None
    alone = kept.settings.get("local_cpu") == "False"
    return Answer(
        f"{kept.number} lookups, 0 hits; the controller was asked {kept.empty} times and knew no peer"
        + ("; local_cpu is False, so engines announce no chunks" if alone else ""),
        verdict="violated" if alone else "unknown",
    )


@finding("KVD326", "engines-with-different-keys", Severity.SLOW, on=[""])
def engines_with_different_keys(log: Diagnosis, line: LogLine) -> Answer | None:
    """Engines that share a store find no chunk of each other, because their keys differ.

    Cause: a key has the model's name from --model, the number of ranks, the rank, the dtype of the KV, and the hash of
    a chunk of `chunk_size` tokens. If one part differs, the key differs.

    Setting: `vllm serve MODEL --tensor-parallel-size N --kv-cache-dtype TYPE` and `chunk_size` equal in all engines,
    with the same path for MODEL.
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
        evidence=tuple(each.evidence for each in kept.engines.values())[:4],
    )


#: Default of `max_local_cpu_size` in GB, in every release.
DEFAULT = 5.0
#: `size: 1.5300 gb` of `Stored ...`, 0.3.9 to 0.5.6.
_SIZE = re.compile(rb"size: (\d{1,6}(?:\.\d{1,6})?) [gG][bB]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class _StoredGigabytes(dict[str, float]):
    """{process: gigabytes that it has stored}"""


@note("stored")
def _note_size(log: Diagnosis, line: LogLine) -> None:
    found = _SIZE.search(line.body)
    if found is not None:
        sizes = log.state(_StoredGigabytes)
        if line.process in sizes or len(sizes) < 64:
            sizes[line.process] = sizes.get(line.process, 0.0) + float(found[1])


@finding("KVD644", "stored-more-than-fits", Severity.SLOW, on=[""])
def stored_more_than_fits(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """No lookup has a hit: more KV is stored than the CPU cache holds, so chunks are evicted before they are needed.

    Cause: LMCache evicts the oldest chunks first. If one round of repeated prompts needs more room than the cache has,
    each chunk is evicted before its prompt repeats.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE, GB for each rank) larger than the KV of one round, which
    the sentence shows. Or set `local_disk` and `max_local_disk_size` of this size. For a test: use fewer prompts.

    Normal: prompts that never repeat.
    """
    kept, sizes = lookups_of(log), log.state(_StoredGigabytes)
    if not sizes or kept.number < ENOUGH or kept.hit or kept.settings.get("remote_url", "None") != "None":
        return None
    named = _NUMBER.match(kept.settings.get("max_local_cpu_size", ""))
    room, most = float(named[0]) if named is not None else DEFAULT, max(sizes.values())
    if most <= room or log.findings:
        return None
    of = "max_local_cpu_size is" if named is not None else "the default of max_local_cpu_size is"
    return Answer(
        f"{kept.number} lookups, 0 hits; a worker has stored {most:.3g} GB, and {of} {room:g} GB",
        verdict="unknown",
    )
