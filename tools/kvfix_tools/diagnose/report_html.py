"""A self-contained HTML page without scripts: the report, counters over time, a line for each request."""

from __future__ import annotations

import io
from html import escape
from time import gmtime, strftime
from typing import TYPE_CHECKING

from rich.console import Console

import kvfix
from kvfix_tools.diagnose import report_text
from kvfix_tools.diagnose.log_finding import by_kind

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding
    from kvfix_tools.diagnose.timeline import Mark, Timeline

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
