"""Findings about logs without an error: a start that does not end, status 500, a decode instance that loads no KV."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of
from kvfix_tools.diagnose.findings.statistics import BY_REQUEST, External

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: A finding needs this many intervals of vLLM's statistics with prompts but without a load.
INTERVALS = 3


@finding
def ended_at_its_buffer(log: Diagnosis, line: LogLine | None) -> Answer | None:
    if log.failures.first is not None or log.findings:
        return None
    last = [(process, at) for process, at in log.failures.last.items() if at.name in ("creating", "engine_configured")]
    goes_on = any(log.counts[name] for name in ("asked", "stored", "stats", "version"))
    if not last or (not log.failures.dead and (goes_on or len(last) < len(log.failures.last))):
        return None
    ranks = f"{len(last)} processes have" if len(last) > 1 else f"{last[0][0] or 'a process'} has"
    size = re.match(r"\d+(?:\.\d+)?", lookups_of(log).settings.get("max_local_cpu_size", ""))
    if size is not None and not float(size[0]):
        return None  # LMCache has no CPU buffer
    room = f"; {len(last)} times {size[0]} GB are {len(last) * float(size[0]):g} GB" if size is not None else ""
    evidence = tuple(at.evidence for _, at in last[:4])
    sentence = f"{ranks} no line after `Creating LMCacheEngine`{room}"
    return Answer(sentence, verdict="unknown", evidence=evidence, note=not log.failures.dead)


@finding
def decode_fetches_nothing(log: Diagnosis, line: LogLine | None) -> Answer | None:
    kept = log.state(External)
    if kept.intervals < INTERVALS or kept.external or log.findings or log.failures.dead:
        return None
    if log.who.roles != {"kv_consumer"} or not log.who.connectors or log.who.connectors - BY_REQUEST:
        return None
    sentence = f"{kept.intervals} intervals with prompts, 0.0% external"
    return Answer(sentence, verdict="unknown", evidence=(kept.last,))


@finding
def answers_500_without_error(log: Diagnosis, line: LogLine | None) -> Answer | None:
    first = log.first.get("answered_500")
    if first is None or log.findings or log.failures.dead or log.failures.first is not None or not log.who.connectors:
        return None
    sentence = f"{log.counts['answered_500']} requests were answered with 500"
    return Answer(sentence, verdict="unknown", evidence=(first.evidence,))


@finding
def start_without_an_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    if log.findings or log.failures.dead or log.failures.first is not None:
        return None
    counts = log.counts
    works = any(
        counts[name]
        for name in ("up", "engine_up", "stats", "asked", "stored", "moved", "answered_500", "closing", "recorded")
    )
    start = log.last.get("vllm_version")
    if start is None or not log.who.connectors or works:
        return None
    sentence = "no process reports the end of its start after `Initializing a V1 LLM engine`"
    return Answer(sentence, verdict="unknown", evidence=(start.evidence,), note=True)
