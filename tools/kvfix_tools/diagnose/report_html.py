"""A self-contained HTML page without scripts: the report, counters over time, a line for each request.

The size of its data, the timeline, does not grow with the log.
"""

from __future__ import annotations

import io
from html import escape
from time import gmtime, strftime
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

import kvfix
from kvfix.ledger.events import Asked
from kvfix_tools.diagnose import report_text
from kvfix_tools.diagnose.log_finding import by_kind

if TYPE_CHECKING:
    from kvfix.ledger.events import Event
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding
    from kvfix_tools.diagnose.log_line import LogLine

#: Maximum number of requests on the page. Requests of findings come first.
LANES = 60
_WIDTH, _LABEL = 1100, 200

_STYLE = """
:root { color-scheme: light dark; --soft: #60646c; --line: #d9d9e0; --bad: #ce2c31; --good: #218358; --mark: #0d74ce; }
@media (prefers-color-scheme: dark) {
  :root { --soft: #b0b4ba; --line: #363a3f; --bad: #ff9592; --good: #3dd68c; --mark: #70b8ff; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1140px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
.soft { color: var(--soft); }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px ui-monospace, monospace; fill: var(--soft); }
.axis { stroke: var(--line); } .run { stroke: var(--line); stroke-width: 6; stroke-linecap: round; }
.curve { fill: none; stroke: var(--mark); stroke-width: 1.5; }
.Asked { fill: var(--mark); } .Loaded, .Stored, .Granted, .LoadDue { fill: var(--good); }
.Raised, .LoadFailed, .Finished { fill: var(--bad); }
"""


#: Seconds since 1970. A time before 2001 comes from a damaged line.
_LONG_AGO = 1e9
#: Maximum number of requests to draw.
DRAWN = 2000
#: Maximum number of intervals of the counters. Intervals get wider in longer logs.
BINS = 240
#: {kind of line: (counter, field to add)}
_COUNTED = {
    "retrieved": (("loaded tokens", "tokens"),),
    "mp_retrieved": (("loaded tokens", "tokens"),),
    "stored": (("stored tokens", "tokens"),),
    "mp_stored": (("stored tokens", "tokens"),),
    "stats": (("running", "running"), ("waiting", "waiting")),
}
#: Counters with a last value in an interval. The others have a sum.
_LEVELS = ("running", "waiting")
_COUNTERS = ("lookups", "hit tokens", "loaded tokens", "stored tokens", *_LEVELS)


class Mark(NamedTuple):
    """An event of a request. time: seconds by the log's clock."""

    time: float
    kind: str
    text: str


class Timeline:
    """Events and counters, which a diagnosis adds."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Mark]] = {}
        self.width = 1.0
        self.bins: dict[int, dict[str, float]] = {}
        self._now: float | None = None

    def event(self, event: Event, time: float | None) -> None:
        if time is None or time < _LONG_AGO:
            return
        if isinstance(event, Asked):
            # A repeated answer is no event: vLLM asks in every step until it has blocks.
            self.count(time, "lookups", 1)
            self.count(time, "hit tokens", event.hit or 0)
        marks = self.requests.get(event.request)
        if marks is None and len(self.requests) < DRAWN and event.request:
            marks = self.requests[event.request] = []
        if marks is not None and len(marks) < 200:
            # Times of vLLM's lines are whole seconds, so they may go back.
            time = max(time, marks[-1].time) if marks else time
            marks.append(Mark(time, type(event).__name__, event.text()))

    def line(self, line: LogLine) -> None:
        """Count every line, also if it is no event of the ledger."""
        if line.time is not None and line.time >= _LONG_AGO:
            self._now = line.time
        for counter, field in _COUNTED.get(line.name, ()):
            self.count(self._now, counter, float(line.fields.get(field, 0)))

    def count(self, time: float | None, name: str, value: float) -> None:
        """Add a value to the counter's interval. Double the width of the intervals if there are too many."""
        if time is None or time < _LONG_AGO:
            return
        self._add(int(time / self.width), name, value)
        if len(self.bins) > BINS:
            old, self.bins, self.width = self.bins, {}, self.width * 2
            for number in sorted(old):
                for counter, sum_ in old[number].items():
                    self._add(number // 2, counter, sum_)

    def _add(self, number: int, name: str, value: float) -> None:
        counters = self.bins.setdefault(number, {})
        counters[name] = value if name in _LEVELS else counters.get(name, 0) + value

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Return {counter: [(seconds, value)]} of the counters with a value, in the order of time."""
        # Empty neighbours make the curve zero between two intervals.
        numbers = sorted({number + step for number in self.bins for step in (-1, 0, 1)})
        return {
            name: [(number * self.width, self.bins.get(number, {}).get(name, 0.0)) for number in numbers]
            for name in _COUNTERS
            if any(counters.get(name) for counters in self.bins.values())
        }


def page(log: Diagnosis, timeline: Timeline, findings: list[LogFinding]) -> str:
    console = Console(record=True, file=io.StringIO(), highlight=False)
    for found, *others in by_kind(findings):
        report_text.print_finding(log, found, console, True, others)
    report_text.print_summary(log, findings, console)
    report = console.export_html(inline_styles=True, code_format="{code}")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>kvfix-diagnose: {len(findings)} findings</title><style>{_STYLE}</style>"
        f"<h1>{len(findings) or 'No'} finding{'' if len(findings) == 1 else 's'}</h1>"
        f"<p class=soft>kvfix {kvfix.__version__}</p><pre>{report}</pre>"
        f"{_counters(timeline)}{_requests(timeline, findings)}</html>\n"
    )


def _counters(timeline: Timeline) -> str:
    series = timeline.series()
    if not series:
        return ""
    times = [time for points in series.values() for time, _ in points]
    start, end = min(times), max(times) + 1
    charts = []
    for row, (name, points) in enumerate(series.items()):
        top, most = row * 64 + 14, max(value for _, value in points)
        curve = " ".join(f"{_x(time, start, end):.1f},{top + 40 - 36 * value / most:.1f}" for time, value in points)
        charts.append(
            f"<text x=0 y={top + 24}>{name}</text><text x=0 y={top + 38}>max {most:g}</text>"
            f"<line class=axis x1={_LABEL} x2={_WIDTH} y1={top + 40} y2={top + 40} />"
            f"<polyline class=curve points='{curve}' />"
        )
    note = f"<p class=soft>Sums of {timeline.width:g} s each.</p>"
    return f"<h2>Over time</h2>{_svg(len(series) * 64 + 20, charts, start, end)}{note}"


def _requests(timeline: Timeline, findings: list[LogFinding]) -> str:
    known = timeline.requests
    accused = [found.request for found in findings if found.request in known]
    shown = list(dict.fromkeys([*accused, *known]))[:LANES]
    if not shown:
        return ""
    start = min(known[name][0].time for name in shown)
    end = max(max(known[name][-1].time for name in shown), start + 0.001)
    lanes = [_lane(name, known[name], row * 18 + 12, start, end) for row, name in enumerate(shown)]
    more = f" {len(known) - len(shown)} more requests are not shown." if len(known) > len(shown) else ""
    legend = f"<p class=soft>Blue: asked. Green: granted, loaded or stored. Red: raised, failed or ended.{more}</p>"
    return f"<h2>Requests</h2>{legend}{_svg(len(shown) * 18 + 24, lanes, start, end)}"


def _lane(name: str, marks: list[Mark], y: int, start: float, end: float) -> str:
    first, last = _x(marks[0].time, start, end), _x(marks[-1].time, start, end)
    dots = "".join(
        f"<circle class={mark.kind} cx={_x(mark.time, start, end):.1f} cy={y} r=4>"
        f"<title>{_clock(mark.time)} {escape(mark.text)}</title></circle>"
        for mark in marks
    )
    label = name if len(name) < 27 else f"{name[:12]}...{name[-11:]}"
    return (
        f"<text x=0 y={y + 4}>{escape(label)}<title>{escape(name)}</title></text>"
        f"<line class=run x1={first:.1f} x2={last:.1f} y1={y} y2={y} />{dots}"
    )


def _svg(height: int, rows: list[str], start: float, end: float) -> str:
    clock = (
        f"<text x={_LABEL} y={height - 2}>{_clock(start)}</text>"
        f"<text x={_WIDTH} y={height - 2} text-anchor=end>{_clock(end)}</text>"
    )
    return f"<svg viewBox='0 0 {_WIDTH} {height}' role=img>{''.join(rows)}{clock}</svg>"


def _x(time: float, start: float, end: float) -> float:
    return _LABEL + 6 + (_WIDTH - _LABEL - 12) * (time - start) / (end - start)


def _clock(time: float) -> str:
    return strftime("%H:%M:%S", gmtime(time)) + f".{int(time % 1 * 1000):03d}"
