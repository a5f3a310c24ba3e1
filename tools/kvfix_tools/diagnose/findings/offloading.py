"""OffloadingConnector of vLLM: what it says of itself at its start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, LogLine

#: Intervals of vLLM's statistics with prompts and local hits, from which on an external rate of 0 is worth a word.
ENOUGH = 5


class External:
    """Intervals of vLLM's statistics with prompts: how many, and the highest hit rates in per cent."""

    def __init__(self) -> None:
        self.intervals = 0
        self.external = self.local = 0.0
        self.last: Evidence | None = None


@note("stats")
def _note_external(log: Diagnosis, line: LogLine) -> None:
    fields, kept = line.fields, log.state(External)
    if fields.get("external") is not None and float(fields["prompt"]):
        kept.intervals += 1
        kept.external = max(kept.external, float(fields["external"]))
        kept.local = max(kept.local, float(fields.get("local") or 0))
        kept.last = line.evidence


@finding("KVD976", "external-cache-never-hits", Severity.NOTE, on=[""])
def external_cache_never_hits(log: Diagnosis, line: LogLine) -> Answer | None:
    """Prompts begin alike, and not one token comes from the connector's cache.

    Cause: in this order. What repeats is still on the GPU: vLLM's own cache answers first, and the connector is asked
    for the rest only. The GPU evicts more between two uses than the CPU tier holds. One KV group of the model never has
    a hit (drafts, state, a window), and then the whole hit is 0 (vLLM before 0.32). Engines that share a store hash
    differently (PYTHONHASHSEED), or `store_threshold` keeps blocks out until they were asked for so often.

    Setting: `--kv-offloading-size` larger, if `GPU KV cache usage` is near 100 %; far below it nothing is to be
    done. Without `--speculative-config` once: hits then mean that the draft group was the cause (upgrade to vLLM
    0.32.0). `export PYTHONHASHSEED=0` on every engine.

    Normal: the first minutes, and prompts that fit into the GPU's cache.
    """
    kept = log.state(External)
    connectors = log.who.connectors - {"NixlConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"}
    if kept.intervals < ENOUGH or kept.external or not kept.local:
        return None
    if log.counts["asked"] or log.counts["mp_prefetched"] or log.findings or log.failures.dead or not connectors:
        return None
    return Answer(
        f"{kept.intervals} intervals with prompts, up to {kept.local}% from the GPU's own cache, 0.0% external",
        request="",
        verdict="unknown",
        evidence=(kept.last,),
    )


@finding("KVD539", "every-group-taken-for-drafts", Severity.SLOW, on=["draft_groups"])
def every_group_taken_for_drafts(log: Diagnosis, line: LogLine) -> Answer | None:
    """With speculative decoding OffloadingConnector drops the end of every KV group's hit, and may find nothing at all.

    Cause: no KV group is marked as the draft model's, and then vLLM before 0.32 takes all for it (vllm#52735). A group
    of state or of a window can serve one chunk only: without its last chunk the whole hit is 0. It is this if `External
    prefix cache hit rate` stays at 0.0%.

    Setting: `vllm serve` without `--speculative-config`, or without OffloadingConnector (`--kv-offloading-size`),
    which then only costs memory.

    Good: upgrade to vLLM 0.32.0 or newer.

    Normal: the groups of the draft model alone, such as `[3]`.
    """
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"all {len(groups)} groups are taken for those of the draft model", request="", verdict="unknown")
