"""The command `kvfix conform`, and its outputs: table, JSON, JUnit XML."""

import json as jsonlib
import sys
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer
from rich.markup import escape
from rich.table import Table

from kvfix import catalogue
from kvfix_tools import screen
from kvfix_tools.command_options import Json, value
from kvfix_tools.conform.verdicts import NOT_APPLICABLE, SLUGS, VIOLATED, Run, run
from kvfix_tools.lab import releases, runner

_COLORS = {VIOLATED: "red", NOT_APPLICABLE: "dim"}
#: _TAGS: JUnit element of each outcome. _COUNTS: {attribute of the suite: element that the attribute counts}.
_TAGS = {VIOLATED: "failure", NOT_APPLICABLE: "skipped"}
_COUNTS = {"failures": "failure", "skipped": "skipped", "errors": "error"}
_CONNECTOR = "The connector's class, or its name in vLLM, such as ExampleConnector."
_CONFIG = """kv_connector_extra_config as JSON, or @FILE to read it from a file. kvfix replaces {dir} by a new, empty
folder for each engine."""
_LOSE = "Call this function to make the connector lose what it has stored."


def conform(
    connector: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help=_CONNECTOR)],
    config: Annotated[str, value("JSON", _CONFIG)] = "{}",
    lose: Annotated[str, value("MODULE:FUNCTION", _LOSE)] = "",
    seconds: Annotated[float, typer.Option(help="Seconds for random schedules, played after the scenarios.")] = 30.0,
    seeds: Annotated[str, value("A:B", "Draw schedules with these seeds.")] = "0:100000",
    fixes: Annotated[bool, typer.Option(help="Apply kvfix's fixes for vllm.v1.core, or no fix.")] = True,
    json: Json = False,
    junit: Annotated[Path | None, value("FILE", "Write JUnit XML.")] = None,
) -> int:
    """Test a KV connector against vLLM's interface. Exit 1: a rule is violated. 2: no KV was loaded, or no test ran."""
    first, _, last = seeds.partition(":")
    try:
        drawn = range(int(first), int(last or int(first) + 1))
    except ValueError:
        raise typer.BadParameter("--seeds is A:B, or one number") from None
    try:
        settings = read_config(config)
        prepare()
    except ValueError as error:
        return screen.error(f"kvfix conform: {error}")
    from kvfix_tools.conform.player import Subject

    with chosen(fixes):
        done = run(Subject(connector, settings, lose), seconds, drawn, screen.progress)
    screen.progress("")
    if junit is not None:
        junit.write_bytes(as_junit(done))
    if json:
        print(jsonlib.dumps(done.as_json(), indent=2))
    else:
        show(done)
    return done.exit_code


def read_config(text: str) -> dict[str, object]:
    """Return the connector's configuration from JSON or @FILE. Raise ValueError for anything else."""
    source = Path(text[1:]).read_text() if text.startswith("@") else text
    try:
        config = jsonlib.loads(source or "{}")
    except jsonlib.JSONDecodeError as error:
        raise ValueError(f"--config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("--config must be a JSON object: the value of vLLM's kv_connector_extra_config")
    return config


def prepare() -> None:
    """Let Python import connectors from the current folder. Raise ValueError if the lab cannot run this vLLM."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    runner.prepare(None, ("vllm",))
    if why := releases.cannot_play(""):
        raise ValueError(f"not applicable: {why}; installed: vllm {releases.versions()['vllm']}")


def chosen(fixes: bool) -> AbstractContextManager[None]:
    """If `fixes` is true, apply only kvfix's fixes of `vllm.v1.core`. Fixes of connectors would hide violations."""
    own = [fix for fix in catalogue.fixes() if fix.module_name.startswith("kvfix.fixes.scheduler.")]
    of_core = [fix.code for fix in own if fix.targets[0].module.startswith("vllm.v1.core.")]
    return runner.applied(fixes, only=of_core)


def show(done: Run) -> None:
    console = screen.console()
    if done.cannot:
        console.print(f"{escape(done.subject.connector)} cannot run: {escape(done.cannot)}", highlight=False)
        return
    table = Table("rule", "verdict", "", box=None, pad_edge=False, header_style="bold")
    for verdict in done.verdicts:
        text = verdict.reason or SLUGS[verdict.rule].title
        table.add_row(verdict.rule, verdict.outcome, escape(text), style=_COLORS.get(verdict.outcome))
    console.print(table)
    for each in done.violations:
        console.print(f"\n[bold]{each.rule}[/] ({escape(each.where)}): {escape(each.message)}", highlight=False)
        options = ", ".join(f"{name}={value!r}" for name, value in each.options.items())
        console.print(escape(f"  engine: {options}") if options else "", end="\n" if options else "", highlight=False)
        for heading, lines in (("shortest schedule:", each.schedule), ("history:", each.history)):
            console.print(f"  {heading}", highlight=False)
            for line in lines:
                console.print(f"    {escape(line)}", highlight=False)
    print(
        f"\n{len(done.cases)} scenarios, {done.seeds} fuzzer seeds, {done.steps} scheduler steps, "
        f"{done.counts.get('loaded_tokens', 0)} tokens loaded, {done.seconds:.0f} s"
    )
    if done.stand_in:
        print(f"kvfix replaced a part of the connector for this test: {done.stand_in}")
    if done.tested_nothing:
        print(done.tested_nothing)


def as_junit(done: Run) -> bytes:
    """Return JUnit XML: a test for each scenario, and a failed test for each violation that only the fuzzer found."""
    tests = [(each.rule, each.name, _TAGS.get(each.outcome, ""), each.reason, each.seconds) for each in done.cases]
    of_fuzzer = [each for each in done.violations if each.where.startswith("seed")]
    tests += [(each.rule, f"{each.code} {each.where}", "failure", each.message, 0.0) for each in of_fuzzer]
    if done.cannot or done.tested_nothing:
        tests.append(("run", "tests something", "error", done.cannot or done.tested_nothing, 0.0))
    tags = Counter(tag for _, _, tag, *_ in tests)
    suite = ElementTree.Element("testsuite", name=f"kvfix conform {done.subject.connector}", time=f"{done.seconds:.1f}")
    suite.attrib.update({"tests": str(len(tests)), **{name: str(tags[tag]) for name, tag in _COUNTS.items()}})
    for rule, name, tag, message, seconds in tests:
        test = ElementTree.SubElement(suite, "testcase", classname=rule, name=name, time=f"{seconds}")
        if tag:
            found = next((each for each in done.violations if each.message == message), None)
            lines = [] if found is None else [*found.schedule, "", *found.history]
            ElementTree.SubElement(test, tag, message=message).text = "\n".join(lines)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
