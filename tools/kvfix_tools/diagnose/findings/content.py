"""Findings about wrong or missing KV in an engine that keeps running."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine


#: Maximum number of lines that a finding shows.
_SHOWN = 4


class _TakenForDone(list["LogLine"]):
    """Failed loads of a release that may report failed loads as done."""


@finding
def failed_load_taken_for_done(log: Diagnosis, line: LogLine | None) -> Answer | None:
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


@finding
def load_failed_in_vllm(log: Diagnosis, line: LogLine) -> Answer | None:
    f = line.fields
    if line.name == "kv_failing":
        return Answer(f"{f['objects']} requests with {f['tokens']} tokens ended with an error")
    return Answer(f"{f['objects']} requests are computed again ({f['tokens']} tokens)")


def _evicted_in_parts(line: LogLine) -> bool:
    """Return True if all ranks have a hit and the lengths differ. Then their hashes agree."""
    hits = {int(each) for each in re.findall(r"\d+", line.fields["results"])}
    return len(hits) > 1 and 0 not in hits


@finding
def ranks_differ(log: Diagnosis, line: LogLine) -> Answer | None:
    if _evicted_in_parts(line):
        return None
    settings = lookups_of(log).settings
    # The finding is certain only if the log has the configuration, and PD is off.
    without_pd = bool(settings) and all(settings.get(role, "None") == "None" for role in ("pd_role", "nixl_role"))
    return Answer(
        f"hit tokens by rank: {line.fields['results'][:80]}",
        verdict="violated" if without_pd else "unknown",
    )


@finding
def ranks_evicted_apart(log: Diagnosis, line: LogLine) -> Answer | None:
    if not _evicted_in_parts(line):
        return None
    return Answer(f"hit tokens by rank: {line.fields['results'][:80]}")


@finding
def preempted_while_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.fields["what"] != "preempted" or log.releases.within("lmcache", ">=0.5.2,<0.5.6") is not True:
        return None
    return Answer("requests were preempted, and this LMCache does not wait for stores in flight")


@finding
def pins_run_out(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.name == "forced_unpin":
        return Answer(f"{line.fields['objects']} chunks were unpinned after the timeout")
    return Answer(f"a chunk had {line.fields['pins']} pins that were not released")


#: All CacheBlend separators of a prompt together have fewer tokens than this.
_SEPARATORS = 64


@finding
def store_does_not_give_what_it_lists(log: Diagnosis, line: LogLine) -> Answer | None:
    short = _missing(line)
    if not short or not log.counts["unretrievable"]:
        return None
    evicted = log.releases.within("lmcache", "<0.3.13")  # newer releases ask the store again at the load
    return Answer(short, verdict="unknown" if evicted else "violated")


@finding
def load_comes_short(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.name == "load_failed":
        return Answer(f"{line.fields['tokens']} tokens in {line.fields['blocks']} blocks were not loaded")
    missing = _missing(line)
    if not missing or log.counts["unretrievable"] or _between_segments(line):
        return None
    return Answer(missing)


@finding
def hit_not_read(log: Diagnosis, line: LogLine | None) -> Answer | None:
    times = log.counts["unretrievable"]
    if not times or log.counts["short"] or log.counts["retrieved"]:
        return None
    return Answer(f"{times} chunks were found by a lookup, but could not be read", "", "unknown")


def _between_segments(line: LogLine) -> bool:
    """Return True if the missing tokens are CacheBlend's separators, which lookups count but stores do not.

    CacheBlend loads layer by layer, and logs `out of total` for this."""
    if line.name != "retrieved" or b"out of total" not in line.body:
        return False
    missing = int(line.fields["required"]) - int(line.fields["tokens"])
    return missing < _SEPARATORS and missing * 50 < int(line.fields["required"])


def _missing(line: LogLine) -> str:
    f = line.fields
    due = f["expected"] if line.name == "short" else f["required"]
    return f"{f['tokens']} of {due} tokens were loaded, {due - f['tokens']} are missing" if f["tokens"] < due else ""
