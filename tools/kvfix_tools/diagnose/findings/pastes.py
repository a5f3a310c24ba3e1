"""Few lines, as they are pasted: whether a log is such, and what its lookups and its settings then still tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups_seen import CHUNK, ENOUGH, Lookups, by_layers, lookups_of
from kvfix_tools.diagnose.findings.memory import PASTE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Findings that say nothing about what was looked up.
_ASIDE = frozenset({"KVD424"})


def is_short(log: Diagnosis) -> bool:
    return all(found.rule.code in _ASIDE for found in log.findings) and log.counts.total() <= PASTE


def is_paste(log: Diagnosis) -> bool:
    return not log.hit and is_short(log)


def is_one_process(kept: Lookups) -> bool:
    return len(kept.askers | kept.storers) == 1


def is_lossy(log: Diagnosis) -> bool:
    settings = lookups_of(log).settings
    return settings.get("remote_serde") == "cachegen" and settings.get("remote_url", "None") != "None"


@finding("KVD1118", "same-text-of-other-tokens", Severity.RISK, on=[""])
def same_text_of_other_tokens(log: Diagnosis, line: LogLine) -> Answer | None:
    """Prompts of the same length are stored and looked up in one process, and do not hit: their tokens differ.

    Cause: one process hashes for both, so PYTHONHASHSEED cannot be it. In this order. The beginnings differ where the
    texts look alike: a date, a time or an id in the system prompt or the chat template, which changes the first chunk
    and all after it. The prompt has images, and their hashes differ or are not handed on. The chunks were evicted in
    between (`max_local_cpu_size`), or vLLM was restarted.

    Setting: POST both prompts to /tokenize and compare the first 256 ids; keep what changes at the end of the prompt;
    with images send the same bytes, and try LMCache 0.4.1 or newer.

    Good: prompts whose beginning is the same for all requests that are to share it.

    Normal: other prompts of the same length.
    """
    kept = lookups_of(log)
    if not kept.number < ENOUGH or not kept.twice >= (kept.chunk or CHUNK) or not is_paste(log):
        return None
    if not kept.stored or not is_one_process(kept) or kept.ahead >= (kept.chunk or CHUNK):
        return None
    sentence = f"prompts of {kept.twice} tokens came twice and were stored, 0 hits"
    return Answer(sentence, request="", verdict="unknown", record=by_layers(log))


@finding("KVD1222", "dynamic-nixl-never-hits", Severity.SLOW, on=[""])
def dynamic_nixl_never_hits(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCache's NIXL store with a pool size of 0 keeps chunks in files, and no lookup finds one.

    Cause: with `nixl_pool_size: 0` the lookup asks NIXL which descriptors exist, in one call for all chunks, and that
    answers for object stores only: for files (POSIX, GDS, GDS_MT, HF3FS) it is always none
    (nixl_storage_backend.py 0.4.7:725). What was stored is written again and again.

    Setting: `nixl_pool_size: 1024` or more in `extra_config`, for so many chunks, or LMCache 0.5.1.

    Good: LMCache 0.5.1 or newer.
    """
    kept = lookups_of(log)
    typed = any(b"nixl_pool_size: 0" in text for text in log.pasted)
    if log.hit or not kept.number or not (typed or kept.settings.get("nixl_pool_size") == "0"):
        return None
    if log.releases.within("lmcache", ">=0.4.5,<0.5.1") is False:
        return None
    return Answer(f"nixl_pool_size is 0; {kept.number} lookups, 0 hits", request="", verdict="unknown")


@finding("KVD1096", "kv-is-stored-with-losses", Severity.RISK, on=[""])
def kv_is_stored_with_losses(log: Diagnosis, line: LogLine) -> Answer | None:
    """What comes from the remote store is not what was stored: CacheGen rounds the KV.

    Cause: `remote_serde: cachegen` quantizes keys and values before it writes them, so an answer after a hit differs
    from one without, and accuracy on a second run is lower. It was lower still on vLLM with the Triton attention
    backend before vllm#19138.

    Setting: `remote_serde: naive` (LMCACHE_REMOTE_SERDE=naive) and an empty store, where answers must be the same.

    Good: `remote_serde: naive`: cachegen is lossy by its design, in every release.

    Normal: cachegen that was chosen for the network's sake.
    """
    kept = lookups_of(log)
    if not is_lossy(log) or not kept.hits or not is_short(log):
        return None
    return Answer("remote_serde is cachegen, and lookups hit", request="", verdict="unknown")
