"""Find wrong KV, missing KV, and missing progress in an engine that keeps running."""

import re
from typing import Any

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, Answers, decides, finding
from kvfix_tools.diagnose.findings.lookups import lookups_of
from kvfix_tools.diagnose.log_line import Fields, LogLine

#: A request that vLLM has not admitted counts as stuck after this number of equal answers to its lookups.
POLLS = 1000


class _Head:
    """The request whose lookup vLLM repeats. asked, done: numbers of lookups and transfers when the repeats began."""

    fields: Fields = {}
    asked = done = 0


@finding
def asked_for_ever(log: Diagnosis, line: LogLine) -> Answer | None:
    f, head, counts = line.fields, log.state(_Head), log.counts
    done, asked = counts["stored"] + counts["retrieved"], counts["asked"]
    if not head.fields or head.done != done or (head.fields is not f and _answer(head.fields) != _answer(f)):
        # A busy engine also repeats lookups in each step. So another request's lookup or a transfer restarts the count.
        head.fields, head.asked, head.done = f, asked, done
        return None
    if asked - head.asked < POLLS:
        return None
    statistics = log.last.get("stats")
    moving = float(statistics.fields["generation"]) if statistics is not None else None
    if moving or (moving is None and asked - head.asked < 5 * POLLS):
        return None
    head.asked = asked
    same = f"the same answer: hit {f.get('hit')}, need to load {f.get('need')}"
    busy = "" if moving is not None else "; the log lacks vLLM's statistics, so the engine may be only busy"
    return Answer(f"vLLM repeated the lookup at least {POLLS} times, and got {same}{busy}", sure=moving is not None)


def _answer(fields: Fields) -> tuple[Any, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@finding
def lookups_not_answered(log: Diagnosis, line: LogLine) -> Answer | None:
    if log.counts["lookup_timeout"] < 3:
        return None
    rank = line.fields["rank"]
    elsewhere = ". A rank on another node never answers. `lookup_server_worker_ids: [0]` asks only rank 0"
    return Answer(f"rank {rank} did not answer a lookup in time{elsewhere if rank != '0' else ''}")


@finding
def worker_without_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    f = line.fields
    if "what" in f and f["error"]:
        return Answer(f"{f['what']}: {f['error']}")
    if "what" in f:  # the line does not have the text of the error
        return Answer(f"{f['what']}, without a reason", sure=False)
    # Since LMCache 0.4.3, this line ends a traceback, and the traceback has the error.
    raised = log.last.get("raised")
    if raised is None or raised.process != line.process:
        return Answer("LMCache failed to start; the beginning of the line is not in the log")
    error = f"{raised.fields['type']}: {raised.fields['text']}".removesuffix(": ")
    return Answer(f"LMCache failed to start: {error}", evidence=(raised,))


class _Waits(dict[str, int]):
    """For each request, the number of engine steps in which the request waited for its load."""


@finding
def waits_for_load(log: Diagnosis, line: LogLine) -> Answer | None:
    waits = log.state(_Waits)
    if len(waits) < 10_000 or line.request in waits:
        count = waits[line.request] = waits.get(line.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


@finding
def start_waits_for_worker(log: Diagnosis, line: LogLine | None) -> Answer | None:
    if log.counts["broadcast"] < 2 or log.failures.worked_since_wait:
        return None
    sentence = f"{log.counts['broadcast']} times a worker did not read EngineCore's message in time"
    return Answer(sentence, evidence=(log.first["broadcast"],))


@finding
def stands_in_connector(log: Diagnosis, line: LogLine) -> Answer | None:
    fields = line.fields
    in_hook = hook(fields["frames"])
    if not in_hook:
        return None
    file, number, function = fields["frames"][-1]
    where = f"{'/'.join(file.split('/')[-2:])}:{number}"
    process = line.process or "a process"
    return Answer(f"{process} is in {in_hook}, {fields['state']} in {function} ({where})", sure=False)


class _TakenForDone(list[LogLine]):
    """Lines about failed loads, if LMCache's release is unknown. LMCache before 0.5.5 reports a failed load as done."""


@finding
def failed_load_taken_for_done(log: Diagnosis, line: LogLine | None) -> Answer | None:
    unsure = log.state(_TakenForDone)
    sentence = "the load of this request failed, but was reported as done"
    if line is None:  # vLLM logs a failed load only if LMCache has reported the load as failed
        if not unsure or log.counts["kv_failing"] or log.counts["kv_recovered"]:
            return None
        unsure_sentence = f"{sentence} (if LMCache is older than 0.5.5)"
        return Answer(unsure_sentence, unsure[0].request, sure=False, evidence=tuple(unsure))
    if line.fields["what"] != "retrieve" or log.releases.within("lmcache", ">=0.5.5"):
        return None
    if log.releases.within("lmcache", "<0.5.5"):
        return Answer(sentence)
    if len(unsure) < 4:  # the finding shows at most four lines
        unsure.append(line)
    return None


@decides("ranks-differ", "ranks-evicted-apart")
def ranks_with_other_hits(log: Diagnosis, line: LogLine) -> Answers:
    sentence = f"hit tokens by rank: {line.fields['results'][:80]}"
    hits = {int(each) for each in re.findall(r"\d+", line.fields["results"])}
    if len(hits) > 1 and 0 not in hits:  # every rank has a hit, so all ranks compute equal hashes
        yield "ranks-evicted-apart", Answer(sentence)
        return
    settings = lookups_of(log).settings
    # The finding is certain only if the log shows LMCache's settings, with prefill/decode disaggregation off.
    without_pd = bool(settings) and all(settings.get(role, "None") == "None" for role in ("pd_role", "nixl_role"))
    yield "ranks-differ", Answer(sentence, sure=without_pd)


@finding
def preempted_while_stored(log: Diagnosis, line: LogLine) -> Answer | None:
    if line.fields["what"] != "preempted" or log.releases.within("lmcache", ">=0.5.2,<0.5.6") is not True:
        return None
    return Answer("requests were preempted, and this LMCache does not wait for stores in flight")


#: The CacheBlend separators of a prompt have fewer than _SEPARATORS tokens in total. Lookups count these tokens, but
#: stores do not. CacheBlend loads layer by layer. LMCache's log line of a layerwise load has the text `out of total`.
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
        evicted = log.releases.within("lmcache", "<0.3.13")  # since 0.3.13, a load looks up its chunks again
        yield "store-does-not-give-what-it-lists", short._replace(sure=not evicted)
    elif missing > 0 and not (is_layerwise and missing < _SEPARATORS and missing * 50 < due):
        yield "load-comes-short", short


@finding
def hit_not_read(log: Diagnosis, line: LogLine | None) -> Answer | None:
    times = log.counts["unretrievable"]
    if not times or log.counts["short"] or log.counts["retrieved"]:
        return None
    return Answer(f"{times} chunks were found by a lookup, but could not be read", "", sure=False)
