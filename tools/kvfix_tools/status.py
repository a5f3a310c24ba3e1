"""`kvfix status`: one screen that says which known bugs this installation has, and which of them kvfix fixes."""

import json as jsonlib
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NamedTuple

import typer

import kvfix
from kvfix import applicability, catalogue, installed_source
from kvfix.catalogue import FixRow
from kvfix.fixes.record import EFFECTS, Fix, Target
from kvfix_tools import fix_overview, screen
from kvfix_tools.command_options import Json, Names, flag, value

#: Verdicts that cause exit code 1. The other verdicts, including "opt-in", do not cause exit code 1.
FINDINGS = ("refused", "unknown", "unfixable", "applicable")
#: Verdicts of bugs that the installed code has or may have, including bugs that kvfix has fixed in this process.
_PRESENT = ("refused", "unknown", "unfixable", "applicable", "opt-in", "applied")
_WIDTH = 80  # columns of the overview and of the rows, also on a wider terminal
_LINES = 24

NOTHING_HERE = """\
Neither vLLM nor LMCache is installed for this Python. Run kvfix status where the engine
runs (in its container, with its Python).
Without vLLM and LMCache you can run: kvfix-diagnose LOG, kvfix explain CODE, kvfix status --released"""
#: {verdict: command or advice for the user}
_TYPE = {
    "applicable": "kvfix.apply(), or: kvfix run -- CMD",
    "opt-in": 'kvfix.apply(plus=["{code}"]), after: kvfix explain {code}',
    "refused": "look for a newer release of kvfix",
    "unknown": "kvfix status --probe {code}",
    "unfixable": "kvfix explain {code} gives the workaround",
}
_PID_OR_FIX = "PID: show the fixes that are applied in this running engine. KVF...: show only the rows of these fixes."
_CONNECTOR = "Show only the bugs of these connectors. Default: $KVFIX_CONNECTOR."
_OF_TRANSFER = "Show only the bugs of the connectors in this value of vLLM's --kv-transfer-config."
_EFFECT = "Show rows of one effect: wrong-output, crash, hang, leak or lost-hits."
_PROBE = "Import vLLM and LMCache, and test for each bug whose presence is unknown."
_RELEASED = """Download the newest LMCache and vLLM with pip. Compare their code with the last release that kvfix
knows. Exit 1, and list the fixes, if functions that fixes patch are different or missing."""


class Selected(NamedTuple):
    """The rows that the options select. where: the option or variable that names the connectors, or ""."""

    rows: list[tuple[Fix, FixRow]]
    connectors: frozenset[str]
    where: str
    left_out: int


def status(
    names: Annotated[Names, typer.Argument(metavar="[PID|KVF...]", help=_PID_OR_FIX)] = None,
    json: Json = False,
    everything: Annotated[bool, flag("--all", "Show the row of every fix.")] = False,
    connector: Annotated[str, value("NAME[,NAME]", _CONNECTOR)] = "",
    transfer_config: Annotated[str, value("JSON", _OF_TRANSFER, "--kv-transfer-config")] = "",
    severity: Annotated[str, value("EFFECT", _EFFECT)] = "",
    probe: Annotated[bool, typer.Option(help=_PROBE)] = False,
    released: Annotated[bool, flag("--released", _RELEASED)] = False,
) -> int:
    """Show the known bugs of the installed code. Exit 1: the code has a bug, or may have one.

    A bug does not change the exit code if its only fix is opt-in.
    """
    names = names or []
    if len(names) == 1 and names[0].isdigit():
        from kvfix_tools.look import attach

        return attach.status(int(names[0]), json)
    if released:
        if probe or everything or names or connector or severity or transfer_config:
            raise typer.BadParameter("--released takes no other option, and does not read the installation")
        from kvfix_tools import status_released

        return status_released.status(json)
    rows = catalogue.rows(_probed) if probe else kvfix.status()
    if not rows:
        return screen.error(f"kvfix status: this installation of kvfix has no fixes. {catalogue.REINSTALL}")
    try:
        selected = _select(rows, names, connector, severity, transfer_config)
    except ValueError as error:
        return screen.error(f"kvfix status: {error}")
    found = [row for _, row in selected.rows]
    is_nothing_here = all(row.verdict == "not-installed" for row in rows)
    if json:
        print(jsonlib.dumps([row._asdict() for row in found], indent=2))
    elif names or everything or severity:
        _print_rows(selected, everything or bool(names))
    elif not is_nothing_here:
        print("\n".join(overview(selected)))
    if is_nothing_here:
        if not json:
            print(NOTHING_HERE)
        return 77
    return int(any(row.verdict in FINDINGS for row in found))


def _select(rows: list[FixRow], names: Sequence[str], connector: str, severity: str, transfer_config: str) -> Selected:
    """Raise ValueError for an unknown fix, connector or severity."""
    codes = {_code(name) for name in names}
    effect = severity.strip().lower().replace("-", " ")
    if effect not in ("", *EFFECTS):
        raise ValueError(f"unknown severity {severity!r}; known: {', '.join(EFFECTS)}")
    chosen, where = fix_overview.in_use(connector, transfer_config)
    fixes = {fix.code: fix for fix in catalogue.fixes()}
    asked = [(fixes[row.code], row) for row in rows if not codes or row.code in codes]
    asked = [(fix, row) for fix, row in asked if effect in ("", fix.effect)]
    found = [(fix, row) for fix, row in asked if fix_overview.concerns(fix, chosen)]
    return Selected(found, chosen, where, len(asked) - len(found))


def _code(name: str) -> str:
    fix = catalogue.find(name)
    if fix is None:
        known = [text for each in catalogue.fixes() for text in (each.code, each.slug)]
        hint = screen.did_you_mean(name, known) or " kvfix status --all lists the fixes."
        raise ValueError(f"unknown fix {name!r}.{hint}")
    return fix.code


def _probed(target: Target) -> applicability.Applicability:
    """Judge whether a fix's target has the bug. If the target's code is unknown, run the fix's probe."""
    by_file = applicability.judge(target)
    if by_file.state != "unknown":
        return by_file
    try:
        return applicability.judge_live(target, import_module(target.module))
    except Exception as error:  # noqa: BLE001
        why = f"{target.module} cannot be imported: {type(error).__name__}: {error}"
        return applicability.Applicability("refused", why)


def overview(selected: Selected) -> list[str]:
    """Return at most 24 lines of 80 columns: releases, connector, bugs that kvfix fixes, other bugs, SUMMARY."""
    by_state = sorted(selected.rows, key=lambda each: applicability.STATES.index(each[1].verdict), reverse=True)
    # A fix has two rows if its targets are in two distributions.
    worst = {fix.code: (fix, row) for fix, row in by_state if row.verdict in _PRESENT}
    fixed = [(fix, row) for fix, row in worst.values() if row.verdict in ("applicable", "applied")]
    others = [(fix, row) for fix, row in worst.values() if row.verdict not in ("applicable", "applied")]
    installed = [f"{dist} {found}" for dist in ("vllm", "lmcache") if (found := installed_source.version(dist))]
    connector = "all (only yours: kvfix status --connector NAME)"
    if selected.where:
        connector = f"{', '.join(sorted(selected.connectors))} (from {selected.where})"
    lines = [f"Installed: {', '.join(installed)}; kvfix {kvfix.__version__}", f"Connector: {connector}", ""]
    lines += _counted(fixed, selected)
    here = "Is a running engine patched? kvfix status PID"
    if choice := os.environ.get("KVFIX", ""):
        here = f"KVFIX={choice!r} is set: kvfix acts in processes that you start from this shell."
    end = ["", here, _summary(Counter(row.verdict for _, row in worst.values()))]
    if others:
        lines += ["", "Not fixed by kvfix.apply() alone (kvfix explain CODE tells what to do):"]
        lines += _not_fixed(others, _LINES - len(lines) - len(end))
    return [*lines, *end]


def _not_fixed(others: list[tuple[Fix, FixRow]], room: int) -> list[str]:
    """Return a line for each bug, at most `room` lines in all. The worst effects come first."""
    others.sort(key=lambda each: (EFFECTS.index(each[0].effect), each[1].code))
    shown = others if len(others) <= room else others[: room - 1]
    texts = [f"  {row.verdict:<10} {row.code}  {fix.title}" for fix, row in shown]
    lines = [text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4].rsplit(' ', 1)[0]} ..." for text in texts]
    left = len(others) - len(shown)
    return [*lines, f"  and {left} more: kvfix status --all"] if left else lines


def _summary(counts: Counter[str]) -> str:
    words = {"applied": "fixed here", "applicable": "to be fixed by kvfix.apply()", "unknown": "undecided"}
    summed = [f"{counts[verdict]} {words.get(verdict, verdict)}" for verdict in _PRESENT[::-1] if counts[verdict]]
    return f"SUMMARY: {', '.join(summed) or 'no known bug'}"


def _counted(fixed: list[tuple[Fix, FixRow]], selected: Selected) -> list[str]:
    """Return a table of bugs that kvfix fixes, with a row for each connector and a column for each effect."""
    if not fixed:
        return ["No known bug of these releases is left for kvfix.apply() to fix."]
    groups: dict[str, Counter[str]] = {}
    for fix, _ in fixed:
        names = sorted(fix_overview.connectors(fix) or ["every connector"])
        for name in ["these connectors"] if selected.where else names:
            groups.setdefault(name, Counter())[fix.effect] += 1
    width = max(map(len, groups))
    table = [f"  {'':<{width}}" + "".join(f"  {effect}" for effect in EFFECTS)]
    for name, counts in sorted(groups.items(), key=lambda each: each[0].lower()):
        table.append(f"  {name:<{width}}" + "".join(f"  {counts[effect]:>{len(effect)}}" for effect in EFFECTS))
    return ["Known bugs of these releases that kvfix.apply() fixes:", *table]


def _print_rows(selected: Selected, everything: bool) -> None:
    rows = [(fix, row) for fix, row in selected.rows if everything or row.verdict in _PRESENT]
    states = applicability.STATES
    rows.sort(key=lambda each: (states.index(each[1].verdict), EFFECTS.index(each[0].effect), each[1].code))
    for fix, row in rows:
        installed = f"{row.dist} {row.version}".strip()
        print(f"{row.code} {row.verdict} ({fix.effect}; {installed})")
        do = _TYPE.get(row.verdict, "").format(code=row.code)
        for text in (fix.title, row.reason, f"Type: {do}" if do else ""):
            if text:
                print(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    if selected.left_out:
        print(f"{selected.left_out} rows are for connectors that {selected.where} does not name.")
    if left := len(selected.rows) - len(rows):
        print(f"{left} rows need no action (kvfix status --all lists them).")
