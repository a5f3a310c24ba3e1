"""Findings about vLLM's OffloadingConnector and about external hit rates."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, LogLine

#: Minimum number of intervals in vLLM's statistics with prompts and local hits for a finding.
ENOUGH = 5


class External:
    """Intervals of vLLM's statistics with prompts: their number, and the highest hit rates in per cent."""

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
    """No token comes from the connector's cache, although prompts have a common beginning.

    Cause: usually the common part is still on the GPU: vLLM's own cache answers first, and asks the connector only for
    the rest. Or the GPU evicts more KV between two uses than the CPU tier holds. Or one KV group (drafts, state, a
    window) never has a hit, and the whole hit is 0 (vLLM before 0.32). Or engines that share a store hash differently
    (PYTHONHASHSEED). Or `store_threshold` delays the store of blocks.

    Setting: `--kv-offloading-size` larger, if `GPU KV cache usage` is near 100 %. If the usage is much lower, do
    nothing. Try once without `--speculative-config`: if hits appear, upgrade to vLLM 0.32.0. For engines that share a
    store, `export PYTHONHASHSEED=0` on every engine.

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
    """With speculative decoding, OffloadingConnector shortens every hit, or has no hits at all.

    Cause: if no KV group is marked as the draft model's, vLLM before 0.32 takes all groups for draft groups, and drops
    the last chunk of each hit (vllm#52735). A group of state or of a window needs its last chunk, so the whole hit is
    0. If `External prefix cache hit rate` stays at 0.0%, this is the cause.

    Setting: `vllm serve` without `--speculative-config`, or without OffloadingConnector (`--kv-offloading-size`), which
    otherwise only uses memory.

    Good: upgrade to vLLM 0.32.0 or newer.

    Normal: a list of the draft model's groups only, such as `[3]`.
    """
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"vLLM takes all {len(groups)} groups for groups of the draft model", request="", verdict="unknown")
