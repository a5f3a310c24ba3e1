"""Findings from vLLM's statistics: an engine that stands still, external hit rates, slow transfers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine


#: A finding needs this many intervals of vLLM's statistics (10 seconds each) with requests but without a token.
IDLE = 3
#: Connectors of a decode instance that load only blocks which a request names.
BY_REQUEST = {"NixlConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
#: Below ROOM per cent of used KV blocks, no request waits for blocks. Above ALL per cent of external hits, a decode
#: instance computes no prompt.
ROOM, ALL = 80.0, 99.0
#: The kind of standstill: requests in the queue, a step that does not end, requests that wait for prefill.
_QUEUE, _STEP, _PREFILL = "queue", "step", "prefill"


class _Still(dict[tuple[str, str], "tuple[int, str, Evidence, str]"]):
    """{engine: (intervals without a token, text of its statistics, last line, kind of standstill)}"""


@note("stats")
def _note_standstill(log: Diagnosis, line: LogLine) -> None:
    still = log.state(_Still)
    f = line.fields
    engine = _engine(line)
    if not (f["waiting"] or f["running"]) or float(f["prompt"]) or float(f["generation"]):
        still.pop(engine, None)
        return
    count = still[engine][0] + 1 if engine in still else 1
    what = f"Running {f['running']}, Waiting {f['waiting']}, no token"
    if engine in still or len(still) < 1000:
        looks_like = _PREFILL if _awaits_prefill(log, f) else _QUEUE if f["waiting"] else _STEP
        still[engine] = (count, what, line.evidence, looks_like)


@finding
def nothing_moves(log: Diagnosis, line: LogLine | None) -> Answer | None:
    return _stands(log, line, _QUEUE)


@finding
def step_does_not_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    return _stands(log, line, _STEP)


def _awaits_prefill(log: Diagnosis, fields: Fields) -> bool:
    """Return True for a decode instance with free blocks on which all requests wait for KV of a prefill instance.

    If the log does not name the connector, all waiting requests must be deferred, and all hits external.
    """
    of_decode = log.who.connectors <= BY_REQUEST and "kv_producer" not in log.who.roles
    if not log.who.connectors:
        of_decode = fields.get("deferred") == fields["waiting"] and float(fields.get("external") or 0) > ALL
    return bool(of_decode and fields["waiting"] and not fields["running"] and float(fields.get("usage") or 0) < ROOM)


@finding
def decode_waits_for_prefill(log: Diagnosis, line: LogLine | None) -> Answer | None:
    return _stands(log, line, _PREFILL)


def _engine(line: LogLine) -> tuple[str, str]:
    return str(line.fields.get("engine", "")), line.process


def _stands(log: Diagnosis, line: LogLine | None, rule: str) -> Answer | None:
    """Return an answer if an engine has computed nothing for IDLE intervals, in a standstill of this kind."""
    still = log.state(_Still)
    if line is None:
        return _still_at_the_end(log, still, rule)
    count, what, _, looks_like = still.get(_engine(line), (0, "", None, ""))
    if looks_like != rule or count < IDLE:
        return None
    verdict = "violated" if rule == _QUEUE else "unknown"  # one step may take so long
    return Answer(f"{what} for {count} intervals", verdict=verdict)


def _still_at_the_end(log: Diagnosis, still: _Still, rule: str) -> Answer | None:
    """Return an answer for a log that ends in a standstill.

    An engine without progress logs its statistics once at INFO. From then on vLLM logs them at DEBUG (loggers.py
    0.12.0:194 to 0.32.0:272).
    """
    for count, what, evidence, looks_like in still.values():
        if count < IDLE and looks_like == rule and not log.failures.ending:
            sentence = f"{what}, and no later statistics: at INFO vLLM logs none while it computes nothing"
            return Answer(sentence, verdict="unknown", evidence=(evidence,), note=True)
    return None


#: A finding needs this many intervals of vLLM's statistics with prompts, and a local hit in one of them.
PROMPTS = 5


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


@finding
def external_cache_never_hits(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = log.state(External)
    connectors = log.who.connectors - {"NixlConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"}
    if kept.intervals < PROMPTS or kept.external or not kept.local:
        return None
    if log.counts["asked"] or log.counts["mp_prefetched"] or log.findings or log.failures.dead or not connectors:
        return None
    return Answer(
        f"{kept.intervals} intervals with prompts, up to {kept.local}% from the GPU's own cache, 0.0% external",
        verdict="unknown",
        evidence=(kept.last,),
    )


@finding
def every_group_taken_for_drafts(log: Diagnosis, line: LogLine) -> Answer | None:
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"vLLM takes all {len(groups)} groups for groups of the draft model", verdict="unknown")


#: Minimum size of a transfer in MB for a judgement, and a rate in MB/s that RDMA and NVLink exceed by far.
LARGE, SLOW = 16.0, 1000.0


class _Moved:
    """Intervals with large transfers, and the fastest one."""

    def __init__(self) -> None:
        self.intervals = 0
        self.best: LogLine | None = None


@note("moved")
def _note_rate(log: Diagnosis, line: LogLine) -> None:
    if float(line.fields["size"]) >= LARGE:
        kept = log.state(_Moved)
        kept.intervals += 1
        if kept.best is None or float(line.fields["rate"]) >= float(kept.best.fields["rate"]):
            kept.best = line


@finding
def kv_goes_by_tcp(log: Diagnosis, line: LogLine | None) -> Answer | None:
    kept = log.state(_Moved)
    if kept.best is None or float(kept.best.fields["rate"]) >= SLOW:
        return None
    fields = kept.best.fields
    return Answer(
        f"at best {float(fields['rate']):.0f} MB/s in {kept.intervals} intervals, {fields['size']} MB each",
        verdict="unknown",
        evidence=(kept.best.evidence,),
    )
