"""Find engines without progress, without external hits or with slow transfers in vLLM's statistics."""

import re
from functools import partial

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import FUNCTIONS, Answer, Answers, decides, finding, note
from kvfix_tools.diagnose.log_line import Fields, LogLine

#: A finding needs this number of statistics intervals (10 s each) with requests, but no computed token.
IDLE = 3
#: With these connectors, a decode instance loads only the blocks that a request names.
BY_REQUEST = {"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
#: These connectors move KV from a prefill instance to a decode instance, and keep no copy.
_PAIRS = BY_REQUEST | {"P2pNcclConnector"}
#: If fewer than ROOM per cent of KV blocks are used, no request waits for blocks. If the log names no connector, kvfix
#: treats an engine with an external hit rate above ALL per cent as a decode instance.
ROOM, ALL = 80.0, 99.0
#: Findings (rules.toml): requests are queued without progress, an engine step does not end, or prefill sends no KV.
_QUEUE, _STEP, _PREFILL = "nothing-moves", "step-does-not-end", "decode-waits-for-prefill"


class _Still(dict[tuple[str, str], "tuple[int, str, LogLine, str]"]):
    """Engines without progress, each with (intervals without a token, statistics as text, last line, finding)."""


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
        still[engine] = (count, what, line, looks_like)


def _awaits_prefill(log: Diagnosis, fields: Fields) -> bool:
    """Return True if a decode instance has free blocks, but all requests wait for KV of a prefill instance."""
    of_decode = log.who.connectors <= BY_REQUEST and "kv_producer" not in log.who.roles
    if not log.who.connectors:
        of_decode = fields.get("deferred") == fields["waiting"] and float(fields.get("external") or 0) > ALL
    return bool(of_decode and fields["waiting"] and not fields["running"] and float(fields.get("usage") or 0) < ROOM)


def _engine(line: LogLine) -> tuple[str, str]:
    return str(line.fields.get("engine", "")), line.process


def _stands(record: str, log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Return an answer if an engine has computed no token for IDLE intervals, and the finding `record` fits the engine.

    At the end of a log, fewer intervals are enough for a note. An engine without progress logs its statistics only once
    at INFO, and then at DEBUG (loggers.py 0.12.0:194 to 0.32.0:280).
    """
    still = log.state(_Still)
    if line is not None:
        count, what, _, looks_like = still.get(_engine(line), (0, "", None, ""))
        is_still = looks_like == record and count >= IDLE
        # Only _QUEUE is certain. With _STEP, one step may take all these intervals. With _PREFILL, KV may still arrive.
        return Answer(f"{what} for {count} intervals", sure=record == _QUEUE) if is_still else None
    for count, what, last, looks_like in still.values():
        if count < IDLE and looks_like == record and not log.failures.closing:
            sentence = f"{what}, and no later statistics: without progress, vLLM logs its statistics only once at INFO"
            return Answer(sentence, sure=False, evidence=(last,), note=True)
    return None


FUNCTIONS.update({record: partial(_stands, record) for record in (_QUEUE, _STEP, _PREFILL)})


#: A finding needs this number of intervals with prompts: PROMPTS for an engine with hits in vLLM's own cache, and
#: INTERVALS for a decode instance.
PROMPTS, INTERVALS = 5, 3


class _External:
    """The number of statistics intervals with prompts, and the highest hit rates in per cent."""

    intervals = 0
    external = local = 0.0
    last: LogLine | None = None


@note("stats")
def _note_external(log: Diagnosis, line: LogLine) -> None:
    fields, kept = line.fields, log.state(_External)
    if fields.get("external") is not None and float(fields["prompt"]):
        kept.intervals += 1
        kept.external = max(kept.external, float(fields["external"]))
        kept.local = max(kept.local, float(fields.get("local") or 0))
        kept.last = line


@decides("external-cache-never-hits", "decode-fetches-nothing")
def nothing_external(log: Diagnosis, line: LogLine | None) -> Answers:
    kept, connectors = log.state(_External), log.who.connectors
    if kept.last is None or kept.external or not connectors or log.findings or log.failures.dead:
        return
    prompts, asked = f"{kept.intervals} intervals with prompts", log.counts["asked"] or log.counts["mp_prefetched"]
    if kept.intervals >= PROMPTS and kept.local and connectors - _PAIRS and not asked:
        sentence = f"{prompts}, up to {kept.local}% from the GPU's own cache, 0.0% external"
        yield "external-cache-never-hits", Answer(sentence, sure=False, evidence=(kept.last,))
    if kept.intervals >= INTERVALS and connectors <= BY_REQUEST and log.who.roles == {"kv_consumer"}:
        yield "decode-fetches-nothing", Answer(f"{prompts}, 0.0% external", sure=False, evidence=(kept.last,))


@finding
def every_group_taken_for_drafts(log: Diagnosis, line: LogLine) -> Answer | None:
    groups = [int(number) for number in re.findall(r"\d{1,6}", line.fields["groups"])]
    if len(groups) < 2 or groups != list(range(len(groups))) or log.releases.within("vllm", ">=0.32"):
        return None
    return Answer(f"vLLM treats all {len(groups)} KV groups as groups of the draft model", sure=False)


#: kvfix judges only the rate of transfers of at least LARGE MB. RDMA and NVLink are far faster than SLOW MB/s.
LARGE, SLOW = 16.0, 1000.0


class _Moved:
    """The number of statistics intervals with large transfers, and the line of the fastest interval."""

    intervals = 0
    best: LogLine | None = None


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
    rate, size = float(kept.best.fields["rate"]), kept.best.fields["size"]
    sentence = f"at best {rate:.0f} MB/s in {kept.intervals} intervals, {size} MB each"
    return Answer(sentence, sure=False, evidence=(kept.best,))
