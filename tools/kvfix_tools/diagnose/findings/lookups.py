"""Findings about at least ten lookups without a hit, if the log shows the cause."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import CHUNK, ENOUGH, Lookups, LookupsByFile, lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


def _never(log: Diagnosis) -> Lookups | None:
    """Return the lookups if there are enough of them and none has a hit; else None."""
    kept = lookups_of(log)
    return kept if kept.number >= ENOUGH and not kept.hit else None


@finding
def never_a_hit(log: Diagnosis, line: LogLine) -> Answer | None:
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


@finding
def prompts_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = _never(log)
    chunk = kept.chunk or CHUNK if kept else 0
    if kept is None or kept.stored or kept.longest >= chunk:
        return None
    return Answer(
        f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits; a chunk has {chunk} tokens"
        + ("" if kept.chunk else ", if chunk_size is the default"),
        verdict="violated" if kept.chunk else "unknown",
    )


@finding
def nothing_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = _never(log)
    if kept is None or kept.stored or kept.longest < (kept.chunk or CHUNK):
        return None
    consumer = log.who.roles == {"kv_consumer"}
    return Answer(
        f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits"
        + ("; kv_role is kv_consumer, which does not store" if consumer else ""),
        verdict="violated" if consumer else "unknown",
    )


@finding
def shared_prefix_below_a_chunk(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = _never(log)
    if kept is None or not kept.stored or not kept.chunk or not 0 < kept.local < kept.chunk:
        return None
    return Answer(
        f"{kept.number} lookups, {kept.stored} stores, 0 hits; vLLM itself had at most {kept.local} tokens of a "
        f"prompt, and a chunk has {kept.chunk} tokens",
    )


@finding
def below_the_minimum(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = lookups_of(log)
    if kept.below < ENOUGH or kept.loads or log.counts["retrieved"]:
        return None
    return Answer(
        f"{kept.below} lookups hit up to {kept.most} tokens, but loaded none: min_retrieve_tokens is {kept.least}",
    )


@finding
def peers_without_async_loading(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = _never(log)
    if kept is None or kept.settings.get("enable_p2p") != "True":
        return None
    if kept.settings.get("enable_async_loading") != "False":
        return None
    return Answer(f"{kept.number} lookups, 0 hits; enable_p2p is True, enable_async_loading is False")


@finding
def peers_have_nothing(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = _never(log)
    if kept is None or kept.empty < ENOUGH or log.counts["peer_asked"] > kept.empty:
        return None
    alone = kept.settings.get("local_cpu") == "False"
    return Answer(
        f"{kept.number} lookups, 0 hits; the controller was asked {kept.empty} times and knew no peer"
        + ("; local_cpu is False, so engines announce no chunks" if alone else ""),
        verdict="violated" if alone else "unknown",
    )


@finding
def engines_with_different_keys(log: Diagnosis, line: LogLine) -> Answer | None:
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


@finding
def stored_more_than_fits(log: Diagnosis, line: LogLine | None) -> Answer | None:
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
