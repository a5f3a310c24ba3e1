"""A self-contained HTML page without scripts: findings, counters over time, a line for each request."""

from __future__ import annotations

import re
from html import escape
from time import gmtime, strftime
from typing import TYPE_CHECKING

import kvfix
from kvfix_tools.diagnose import advice, report_text
from kvfix_tools.diagnose.log_finding import by_kind

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_finding import LogFinding
    from kvfix_tools.diagnose.timeline import Mark, Timeline

#: Maximum number of requests on the page. Requests of findings come first.
LANES = 60
_WIDTH, _LABEL = 1100, 200

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --paper: #fcfcfd; --card: #fff;
  --bad: #ce2c31; --warn: #ab6400; --good: #218358; --mark: #0d74ce; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f; --paper: #111113;
  --card: #18191b; --bad: #ff9592; --warn: #ffca16; --good: #3dd68c; --mark: #70b8ff; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1140px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
article { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--warn);
  border-radius: 6px; padding: .8rem 1rem; margin: .8rem 0; }
article.crash, article.wrong, article.hang { border-left-color: var(--bad); }
.head { display: flex; flex-wrap: wrap; gap: .2rem .8rem; align-items: baseline; }
.word { color: var(--bad); font-weight: 600; } .code { font-weight: 600; }
.sentence { font-weight: 600; overflow-wrap: anywhere; }
svg.dot { display: inline; width: .8rem; height: .8rem; vertical-align: -1px; margin-right: .2rem; }
pre { font: 12.5px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0;
  color: var(--soft); }
summary { cursor: pointer; color: var(--soft); }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px ui-monospace, monospace; fill: var(--soft); }
.axis { stroke: var(--line); } .run { stroke: var(--line); stroke-width: 6; stroke-linecap: round; }
.curve { fill: none; stroke: var(--mark); stroke-width: 1.5; }
.Asked { fill: var(--mark); } .Loaded, .Stored, .Granted, .LoadDue { fill: var(--good); }
.Raised, .LoadFailed, .Finished { fill: var(--bad); }
"""


def page(log: Diagnosis, timeline: Timeline, findings: list[LogFinding]) -> str:
    parts = [_article(log, *kind) for kind in by_kind(findings)] or ["<p>Nothing found.</p>"]
    hidden = "".join(
        f"<p class=soft>Not checked: {escape(rule)}. It needs {escape(what)}, which this log level hides. "
        f"Set <code>{escape(how)}</code>.</p>"
        for rule, what, how in log.hidden()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>kvfix-diagnose: {len(findings)} findings</title><style>{_STYLE}</style>"
        f"<h1>{len(findings) or 'No'} finding{'' if len(findings) == 1 else 's'}</h1>"
        f"<p class=soft>{escape(report_text.read_words(log))}. "
        f"kvfix {kvfix.__version__}</p>{''.join(parts)}{hidden}"
        f"{_counters(timeline)}{_requests(timeline, findings)}</html>\n"
    )


def _article(log: Diagnosis, found: LogFinding, *others: LogFinding) -> str:
    """Return one finding in full, and a line for each other finding of its rule."""
    rule = found.rule
    request = f"<span class=soft>request {escape(found.request)}</span>" if found.request else ""
    times = f"<span class=soft>{found.count} times</span>" if found.count > 1 else ""
    unsure = "" if found.is_certain else "<span class=soft>not certain</span>"
    if found.follows is not None:
        unsure += f"<span class=soft>follows from {found.follows.rule.code}</span>"
    history = "\n".join(map(str, found.history))
    ledger = "\n".join(f"{each.code} {each.name}: {each.message}" for each in found.violated)
    lines = "\n".join(str(line) for line in found.evidence)
    same = "\n".join(
        f"{each.request or '-'}: {each.sentence}  {each.evidence[0] if each.evidence else ''}" for each in others
    )
    now, good = advice.remedy(log, found)
    steps = "".join(
        f"<p><b>{name}:</b> {_words(text)}</p>" for name, text in (("Do now", now), ("For good", good)) if text
    )
    return (
        f"<article class={found.severity.name.lower()}><div class=head>"
        f"<span class=word>{escape(found.severity.word)}</span>"
        f"<span class=code>{rule.code} {rule.name}</span>{request}{times}{unsure}</div>"
        f"<p>{_words(rule.title)}</p><p class=sentence>{_words(found.sentence)}</p>"
        + steps
        + f"<p><b>{advice.heading(found)}:</b> {_words(advice.cause(log, found))}</p>"
        + (f"<pre>{escape(history)}\n{escape(ledger)}</pre>" if history or ledger else "")
        + f"<details><summary>In the log ({len(found.evidence)})</summary><pre>{escape(lines)}</pre></details>"
        + (
            f"<details><summary>Other requests ({len(others)})</summary><pre>{escape(same)}</pre></details>"
            * bool(others)
        )
        + "</article>"
    )


def _words(text: str) -> str:
    """Escape a text, and format text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _counters(timeline: Timeline) -> str:
    series = {name: points for name, points in timeline.series().items() if any(value for _, value in points)}
    if not series:
        return ""
    start = min(points[0][0] for points in series.values())
    end = max(max(points[-1][0] for points in series.values()), start + 1)
    charts = []
    for row, (name, points) in enumerate(series.items()):
        top, most = row * 64 + 14, max(value for _, value in points)
        curve = " ".join(f"{_x(time, start, end):.1f},{top + 40 - 36 * value / most:.1f}" for time, value in points)
        charts.append(
            f"<text x=0 y={top + 24}>{escape(name)}</text><text x=0 y={top + 38}>max {most:g}</text>"
            f"<line class=axis x1={_LABEL} x2={_WIDTH} y1={top + 40} y2={top + 40} />"
            f"<polyline class=curve points='{curve}' />"
        )
    return f"<h2>Over time</h2>{_svg(len(series) * 64 + 20, ''.join(charts), start, end)}" + (
        f"<p class=soft>Sums of {timeline.width:g} s each.</p>"
    )


def _requests(timeline: Timeline, findings: list[LogFinding]) -> str:
    known = timeline.requests
    accused = [found.request for found in findings if found.request in known]
    shown = list(dict.fromkeys([*accused, *known]))[:LANES]
    if not shown:
        return ""
    start = min(known[name][0].time for name in shown)
    end = max(max(known[name][-1].time for name in shown), start + 0.001)
    lanes = "".join(_lane(name, known[name], row * 18 + 12, start, end) for row, name in enumerate(shown))
    more = f"<p class=soft>{len(known) - len(shown)} more are not shown.</p>" if len(known) > len(shown) else ""
    return f"<h2>Requests</h2>{_legend()}{_svg(len(shown) * 18 + 24, lanes, start, end)}{more}"


def _legend() -> str:
    kinds = (("Asked", "asked"), ("Loaded", "granted, loaded or stored"), ("Raised", "raised, failed or ended"))
    dots = "".join(
        f"<svg class=dot viewBox='0 0 12 12'><circle class={kind} cx=6 cy=6 r=4 /></svg>{words} "
        for kind, words in kinds
    )
    return f"<p class=soft>{dots}</p>"


def _lane(name: str, marks: list[Mark], y: int, start: float, end: float) -> str:
    first, last = _x(marks[0].time, start, end), _x(marks[-1].time, start, end)
    dots = "".join(
        f"<circle class={mark.kind} cx={_x(mark.time, start, end):.1f} cy={y} r=4>"
        f"<title>{escape(_clock(mark.time))} {escape(mark.text)}</title></circle>"
        for mark in marks
    )
    label = name if len(name) < 27 else f"{name[:12]}...{name[-11:]}"
    return (
        f"<text x=0 y={y + 4}>{escape(label)}<title>{escape(name)}</title></text>"
        f"<line class=run x1={first:.1f} x2={last:.1f} y1={y} y2={y} />{dots}"
    )


def _svg(height: int, inside: str, start: float, end: float) -> str:
    clock = (
        f"<text x={_LABEL} y={height - 2}>{_clock(start)}</text>"
        f"<text x={_WIDTH} y={height - 2} text-anchor=end>{_clock(end)}</text>"
    )
    return f"<svg viewBox='0 0 {_WIDTH} {height}' role=img>{inside}{clock}</svg>"


def _x(time: float, start: float, end: float) -> float:
    return _LABEL + 6 + (_WIDTH - _LABEL - 12) * (time - start) / (end - start)


def _clock(time: float) -> str:
    return strftime("%H:%M:%S", gmtime(time)) + f".{int(time % 1 * 1000):03d}"
