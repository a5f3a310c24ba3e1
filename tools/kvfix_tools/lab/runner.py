"""Play scenarios in this process, with or without the fixes. This module imports neither vLLM nor LMCache."""

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import kvfix
from kvfix import catalogue, installed_source
from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix.session import session
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.releases import cannot_play, missing, versions
from kvfix_tools.lab.scenario import Scenario

if TYPE_CHECKING:
    from kvfix_tools.lab.engine.lab_engine import LabEngine

#: Opt-in fixes that the lab applies by default, because the fuzzer's schedules show the bugs that these fixes repair.
NAMED = ("KVF123", "KVF208", "KVF219", "KVF222", "KVF319", "KVF322", "KVF353")
#: Steps that the lab makes after a schedule, because kvfix checks an ended request for leaks some steps later.
AFTER = 40
#: The message of a finding starts with this text if kvfix, not the lab, has reported the finding.
REPORTED = "kvfix reports: "


class Result(NamedTuple):
    """outcome: violated (the scenario's rule), clean or not-applicable. also: other findings. log: (step, event)."""

    slug: str
    fixes: bool
    outcome: str
    message: str
    also: list[str]
    log: list[tuple[int, Event]] = []
    findings: list[Finding] = []
    counts: dict[str, int] = {}

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("slug", "fixes", "outcome", "message", "also")}


def prepare(lmcache_path: str | None, needs: Sequence[str] = ("vllm", "lmcache")) -> None:
    """Put `lmcache_path` first on sys.path, and set environment variables. Call `prepare` before LMCache is imported.

    needs: distributions that must be installed. Raises ValueError if one of them is missing or the path is wrong.
    """
    if lmcache_path is not None:
        if not Path(lmcache_path, "lmcache", "__init__.py").is_file():
            raise ValueError(f"{lmcache_path} holds no lmcache package; unpack one: pip install --no-deps --target")
        if "lmcache" in sys.modules:
            raise ValueError("lmcache is already imported, and a process can use only one release")
        sys.path.insert(0, str(Path(lmcache_path).resolve()))
        os.environ["PYTHONPATH"] = os.pathsep.join([lmcache_path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Without this setting vLLM uses model runner V2 if it finds Triton. With V2, the fuzzer plays other schedules.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    for dist in needs:
        if installed_source.package_dir(dist) is None:
            raise ValueError(f"{dist} is not installed here, but the lab needs the real package")
    # kvfix reads the versions for every scenario. The installed packages do not change, so find each version once.
    version = installed_source.version
    vars(installed_source)["version"] = functools.cache(getattr(version, "__wrapped__", version))


def expected(scenario: Scenario, releases: dict[str, str] | None = None) -> str:
    """Return the expected outcome without fixes. releases: by default the installed releases."""
    installed = releases or versions()
    if cannot_play(scenario.options.connector, installed) or missing(scenario.needs, installed):
        return "not-applicable"
    return "clean" if missing(scenario.wrong, installed) else "violated"


def play(scenario: Scenario, fixes: bool, only: Sequence[str] = ()) -> Result:
    """Play the scenario once. only: codes of the fixes to apply. Default: the result of `played(*scenario.fixes)`."""
    if expected(scenario) == "not-applicable":
        why = cannot_play(scenario.options.connector) or f"needs {missing(scenario.needs)}"
        return Result(scenario.slug, fixes, "not-applicable", why, [])
    with applied(fixes, only=list(only) or played(*scenario.fixes)):
        engine = scenario.played()
    hits: list[str] = []
    also: list[str] = []
    for found in engine.findings:
        is_wanted = found.code == scenario.rule and scenario.text in found.message
        (hits if is_wanted or found.code == rules.FAULT_OF_KVFIX.code else also).append(str(found))
    outcome, message = ("violated", hits[0]) if hits else ("clean", "")
    return Result(scenario.slug, fixes, outcome, message, also, engine.log, engine.findings, engine.counts)


def played(*more: str) -> list[str]:
    """Return the codes of the default fixes, of NAMED, and of the opt-in fixes in `more`."""
    return [fix.code for fix in catalogue.fixes() if not fix.opt_in or fix.code in (*NAMED, *more)]


@contextmanager
def applied(fixes: bool, mode: str = "fix", only: list[str] | None = None) -> Iterator[None]:
    """Apply kvfix, and turn logging off, in this context. only: codes of fixes, by default `played()`."""
    with quiet():
        kvfix.revert()
        if fixes or mode != "fix":
            kvfix.apply(mode, only=(played() if only is None else only) if fixes else [])
        try:
            yield
        finally:
            kvfix.revert()


@contextmanager
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def reported() -> Iterator[list[Finding]]:
    """Yield a list that gets kvfix's reports in this context. The list stays empty in modes that check no rules."""
    found: list[Finding] = []
    violations: Any = sys.modules.get("kvfix.connector_events.violations")
    if violations is None:
        yield found
        return
    report = violations.report

    def listen(watched: Any, hook: str, finding: Finding, error: Exception | None) -> None:
        found.append(finding._replace(message=f"{REPORTED}{finding.message}"))
        report(watched, hook, finding, error)

    with mock.patch.object(violations, "report", listen):
        yield found


def let_leaks_be_reported(engine: "LabEngine") -> None:
    """If kvfix watches the engine, make steps until kvfix has checked the last requests for leaks."""
    if session.mode != "fix":
        engine.step(AFTER)


def reports(scenario: Scenario) -> list[str]:
    """Play the scenario in mode `check` without fixes. Return kvfix's reports, oldest first."""
    with tempfile.TemporaryDirectory(prefix="kvfix-lab-") as folder:
        with mock.patch.dict("os.environ", KVFIX_DUMP_DIR=folder), applied(False, "check"):
            scenario.played(let_leaks_be_reported)
        written = sorted(Path(folder).rglob("*.txt"), key=lambda path: int(path.name.split("-")[3]))
        return [path.read_text() for path in written]
