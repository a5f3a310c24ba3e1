"""Lookups without a hit in a log of a few lines, as people paste it: never certain, and the last to be reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups import CHUNK, ENOUGH, lookups_of
from kvfix_tools.diagnose.findings.memory import PASTE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


def _is_paste(log: Diagnosis) -> bool:
    return not log.hit and not log.findings and log.counts.total() <= PASTE


@finding("KVD327", "no-hit-in-a-paste", Severity.RISK, on=[""])
def no_hit_in_a_paste(log: Diagnosis, line: LogLine) -> Answer | None:
    """A few lookups, none of which finds anything: too few to tell why.

    Cause: in this order. A prompt is found from its second request on. One of fewer tokens than `chunk_size` (256) is
    not stored from 0.3.11 on (`save_unfull_chunk` is false). Else the processes hash differently: PYTHONHASHSEED is not
    set, so what a worker or another engine stored is not found; up to 0.3.15 on Python 3.11 and older not even with it.

    Setting: `export PYTHONHASHSEED=0` before every vLLM process (each engine, and the controller) or
    `pre_caching_hash_algorithm: sha256_cbor`, restart; then a prompt of more than `chunk_size` tokens, sent twice.

    Good: the same, in every unit file and container; LMCache 0.4.1 or newer.

    Normal: the first request with each prompt.
    """
    kept = lookups_of(log)
    if not 0 < kept.number < ENOUGH or not _is_paste(log):
        return None
    twice = max((total for total, times in kept.totals.items() if times > 1), default=0)
    short = kept.longest < (kept.chunk or CHUNK)
    what = f"{kept.number} lookup{'s' if kept.number > 1 else ''} of up to {kept.longest} tokens, 0 hits"
    if twice and kept.stored:
        return Answer(f"{what}; prompts of {twice} tokens came twice, and were stored", request="", verdict="unknown")
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
    if not 0 < kept.number < ENOUGH or not _is_paste(log) or not (kept.shared and log.counts["hash_seed"]):
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
    if not kept.empty or log.counts["peer_asked"] > kept.empty or not few or not _is_paste(log):
        return None
    return Answer(f"the controller was asked {kept.empty} times and knew no peer", request="", verdict="unknown")
