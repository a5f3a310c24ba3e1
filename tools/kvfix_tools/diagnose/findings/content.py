"""Findings about wrong or missing KV in an engine that keeps running."""

import re

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Answer, Answers, decides, finding
from kvfix_tools.diagnose.findings.lookups import lookups_of
from kvfix_tools.diagnose.log_line import LogLine

#: Maximum number of lines that a finding shows.
_SHOWN = 4


class _TakenForDone(list["LogLine"]):
    """Failed loads of a release that may report failed loads as done."""


@finding
def failed_load_taken_for_done(log: Diagnosis, line: LogLine | None) -> Answer | None:
    unsure = log.state(_TakenForDone)
    sentence = "the load of this request failed, but was reported as done"
    if line is None:  # if vLLM logs a failed load, LMCache has reported it as failed
        if not unsure or log.counts["kv_failing"] or log.counts["kv_recovered"]:
            return None
        unsure_sentence = f"{sentence} (if LMCache is older than 0.5.5)"
        return Answer(unsure_sentence, unsure[0].request, sure=False, evidence=tuple(unsure))
    if line.fields["what"] != "retrieve" or log.releases.within("lmcache", ">=0.5.5"):
        return None
    if log.releases.within("lmcache", "<0.5.5"):
        return Answer(sentence)
    if len(unsure) < _SHOWN:
        unsure.append(line)
    return None


@decides("ranks-differ", "ranks-evicted-apart")
def ranks_with_other_hits(log: Diagnosis, line: LogLine) -> Answers:
    sentence = f"hit tokens by rank: {line.fields['results'][:80]}"
    hits = {int(each) for each in re.findall(r"\d+", line.fields["results"])}
    if len(hits) > 1 and 0 not in hits:  # all ranks have a hit, so their hashes agree
        yield "ranks-evicted-apart", Answer(sentence)
        return
    settings = lookups_of(log).settings
    # The finding is certain only if the log has the configuration, and PD is off.
    without_pd = bool(settings) and all(settings.get(role, "None") == "None" for role in ("pd_role", "nixl_role"))
    yield "ranks-differ", Answer(sentence, sure=without_pd)


@finding
def preempted_while_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.fields["what"] != "preempted" or log.releases.within("lmcache", ">=0.5.2,<0.5.6") is not True:
        return None
    return Answer("requests were preempted, and this LMCache does not wait for stores in flight")


#: All CacheBlend separators of a prompt together have fewer tokens than this. Lookups count them, but stores do not.
#: CacheBlend loads layer by layer, and logs `out of total` for this.
_SEPARATORS = 64


@decides("store-does-not-give-what-it-lists", "load-comes-short")
def load_brings_less(log: Diagnosis, line: LogLine) -> Answers:
    f = line.fields
    if line.name == "load_failed":
        yield "load-comes-short", Answer(f"{f['tokens']} tokens in {f['blocks']} blocks were not loaded")
        return
    due = f["expected"] if line.name == "short" else f["required"]
    missing = due - f["tokens"]
    is_layerwise = line.name == "retrieved" and b"out of total" in line.body
    short = Answer(f"{f['tokens']} of {due} tokens were loaded, {missing} are missing")
    if missing > 0 and log.counts["unretrievable"]:
        evicted = log.releases.within("lmcache", "<0.3.13")  # newer releases ask the store again at the load
        yield "store-does-not-give-what-it-lists", short._replace(sure=not evicted)
    elif missing > 0 and not (is_layerwise and missing < _SEPARATORS and missing * 50 < due):
        yield "load-comes-short", short


@finding
def hit_not_read(log: Diagnosis, line: LogLine | None) -> Answer | None:
    times = log.counts["unretrievable"]
    if not times or log.counts["short"] or log.counts["retrieved"]:
        return None
    return Answer(f"{times} chunks were found by a lookup, but could not be read", "", sure=False)
