"""Chrome trace JSON, for ui.perfetto.dev: a track of async events per request, counters over time, findings as marks.

Requests overlap, so they are async events (`b`, `n`, `e`) with an id, never a stack.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding
    from kvfix_tools.diagnose.timeline import Timeline


def trace(log: Diagnosis, timeline: Timeline, findings: list[LogFinding]) -> str:
    return json.dumps({"traceEvents": _events(timeline, findings), "displayTimeUnit": "ms"})


def _events(timeline: Timeline, findings: list[LogFinding]) -> list[dict[str, Any]]:
    """In the order of time. `ts` in microseconds since the first event."""
    series = timeline.series()
    times = [mark.time for marks in timeline.requests.values() for mark in marks]
    times += [time for points in series.values() for time, _ in points]
    start = min(times, default=0.0)

    def event(phase: str, name: str, time: float, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": max(0, round((time - start) * 1e6)), "pid": 1, "tid": 1, **more}

    made = []
    for request, marks in timeline.requests.items():
        own = {"cat": "request", "id": request}
        made.append(event("b", request, marks[0].time, **own, args={"first": marks[0].text}))
        made += [event("n", mark.kind, mark.time, **own, args={"what": mark.text}) for mark in marks]
        made.append(event("e", request, marks[-1].time, **own))
    for name, points in series.items():
        made += [event("C", name, time, args={"value": value}) for time, value in points]
    for found in findings:
        if found.first is not None and found.first > 1e9:
            title = f"{found.rule.code} {found.rule.name}"
            made.append(event("i", title, found.first, s="g", args={"sentence": found.sentence}))
    made.sort(key=lambda each: each["ts"])  # stable: begin, marks and end of one instant stay in their order
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "kvfix-diagnose"}}
    return [named, *made]
