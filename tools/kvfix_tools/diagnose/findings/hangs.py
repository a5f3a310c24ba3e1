"""Findings about an engine that makes no progress, without a crash."""

from typing import Any

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, finding
from kvfix_tools.diagnose.log_line import Fields, LogLine

#: After this number of equal answers without an admission, a request counts as stuck.
POLLS = 1000


class _Head:
    """The request that vLLM asks about now: its fields, and the counts of lookups and transfers at its first lookup."""

    fields: Fields = {}
    asked = done = 0


@finding
def asked_for_ever(log: Diagnosis, line: LogLine) -> Answer | None:
    f = line.fields
    done = log.counts["stored"] + log.counts["retrieved"]
    asked = log.counts["asked"]
    head = log.state(_Head)
    if not head.fields or head.done != done or (head.fields is not f and _answer(head.fields) != _answer(f)):
        # vLLM asks about another request, or the engine works: vLLM asks in every step of a busy engine too.
        head.fields, head.asked, head.done = f, asked, done
        return None
    statistics = log.last.get("stats")
    moving = float(statistics.fields["generation"]) if statistics is not None else None
    if moving or asked - head.asked < (POLLS if moving is not None else 5 * POLLS):
        return None
    head.asked = asked
    same = f"the same answer: hit {f.get('hit')}, need to load {f.get('need')}"
    busy = "" if moving is not None else "; the engine may be busy, because the log has no statistics of vLLM"
    return Answer(f"asked at least {POLLS} times in a row with {same}{busy}", sure=moving is not None)


def _answer(fields: Fields) -> tuple[Any, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@finding
def lookups_not_answered(log: Diagnosis, line: LogLine) -> Answer | None:
    if log.counts["lookup_timeout"] < 3:
        return None
    rank = line.fields["rank"]
    elsewhere = "; a rank on another node never answers: lookup_server_worker_ids: [0] asks rank 0"
    return Answer(f"rank {rank} did not answer a lookup in time{elsewhere if rank != '0' else ''}")


@finding
def worker_without_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    f = line.fields
    if "what" in f and f["error"]:
        return Answer(f"{f['what']}: {f['error']}")
    if "what" in f:  # an assertion without a text
        return Answer(f"{f['what']}, without a reason", sure=False)
    # From 0.4.3 on the line with these words is the last line of a traceback.
    raised = log.last.get("raised")
    if raised is None or raised.process != line.process:
        return Answer("LMCache failed to start; the beginning of the line is not in the log")
    error = f"{raised.fields['type']}: {raised.fields['text']}".removesuffix(": ")
    return Answer(f"LMCache failed to start: {error}", evidence=(raised,))


class _Waits(dict[str, int]):
    """{request: number of steps in which it waited for its load}"""


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
