"""Play scenarios in this process, as released or with the fixes, and say what came of them.

Importing this module imports neither vLLM nor LMCache; playing does, once for all scenarios.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import target
from kvfix.fix import catalogue
from kvfix.ledger import Finding
from kvfix.ledger.events import Event
from kvfix_tools.lab.options import DRAWN, SINCE
from kvfix_tools.lab.scenario import FAULT, Scenario
from kvfix_tools.lab.schedule import Schedule


class Result(NamedTuple):
    """`outcome`: violated (the expected rule), clean, or not-applicable. `also`: findings of other rules."""

    slug: str
    fixes: bool
    outcome: str
    message: str
    also: list[str]
    story: list[tuple[int, Event]]
    findings: list[Finding]
    counts: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "slug": self.slug,
            "fixes": self.fixes,
            "outcome": self.outcome,
            "message": self.message,
            "also": self.also,
        }


def prepare(lmcache_path: str | None) -> None:
    """Before anything is imported: this LMCache first, and its chatter kept out. Raises ValueError for a wrong path."""
    if lmcache_path is not None:
        if not Path(lmcache_path, "lmcache", "__init__.py").is_file():
            raise ValueError(
                f"{lmcache_path} holds no lmcache package; unpack one with: pip install --no-deps --target"
            )
        if "lmcache" in sys.modules:
            raise ValueError("lmcache is imported already; one release per process")
        sys.path.insert(0, str(Path(lmcache_path).resolve()))
        os.environ["PYTHONPATH"] = os.pathsep.join([lmcache_path, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Else vLLM looks whether Triton is there, and the same schedule is another one on a machine with a GPU (batch.py).
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    for dist in ("vllm", "lmcache"):
        if target.package_dir(dist) is None:
            raise ValueError(f"{dist} is not installed here; the lab plays the real one")
    # The fixes are applied anew for every scenario, and what is installed stays as it is: look for it once.
    vars(target)["version"] = functools.cache(getattr(target.version, "__wrapped__", target.version))


def versions() -> dict[str, str]:
    return {dist: target.version(dist) for dist in ("vllm", "lmcache")}


def expected(scenario: Scenario, releases: dict[str, str] | None = None) -> str:
    """What must come of it without fixes: violated, clean or not-applicable. releases: default, what is installed."""
    installed = releases or versions()
    if cannot_play(scenario.options.connector, installed) or _missing(scenario.needs or {}, installed):
        return "not-applicable"
    wrong = [installed[dist] in SpecifierSet(spec, prereleases=True) for dist, spec in scenario.wrong.items()]
    return "violated" if all(wrong) else "clean"


#: Releases that the lab plays, by connector, and what is with the others.
PLAYABLE = {
    "v1": {
        "lmcache": (">=0.3.9", "earlier ones do not import under vLLM 0.11 and later"),
        "vllm": (">=0.11.2", "earlier ones were not tried"),
    },
    "mp": {
        "lmcache": (">=0.4.5", "earlier ones have no connector that vLLM takes for LMCacheMPConnector"),
        "vllm": (">=0.22.0", "LMCache's connector imports what earlier ones do not have"),
    },
    "mp-in-tree": {
        "lmcache": (
            ">=0.4.4,<0.4.7",
            "vLLM's copy does not import with earlier ones, and hands later ones arguments that they do not take",
        ),
        "vllm": (">=0.22.0", "the copy in earlier ones was not tried"),
    },
}


def lacking() -> set[str]:
    """Settings of the lab that the installed LMCache does not have, and options that the installed vLLM is not for."""
    known = {**dict.fromkeys(SINCE, "lmcache"), **dict.fromkeys(DRAWN, "vllm")}
    return {name for name, dist in known.items() if _missing({dist: {**SINCE, **DRAWN}[name]})}


def cannot_play(connector: str, releases: dict[str, str] | None = None) -> str:
    """Why this connector cannot be played on these releases, by default what is installed; "" if it can."""
    needs = PLAYABLE[connector]
    missing = _missing({dist: specifier for dist, (specifier, _) in needs.items()}, releases)
    why = "; ".join(reason for dist, (_, reason) in needs.items() if dist in missing)
    return f"the lab plays {connector} with {missing}: {why}" if missing else ""


def _missing(needs: dict[str, str], releases: dict[str, str] | None = None) -> str:
    """Those of the needed releases that are not installed; "" if all are."""
    installed = releases or versions()
    return ", ".join(
        f"{dist} {specifier}"
        for dist, specifier in needs.items()
        if installed[dist] not in SpecifierSet(specifier, prereleases=True)
    )


def refused(schedule: Schedule) -> str:
    """Why this schedule cannot be played on what is installed; "" if it can."""
    why = cannot_play(schedule.options.connector)
    lacks = sorted(lacking() & set(schedule.options.lmcache))
    return why or (f"LMCache {versions()['lmcache']} has no setting {', '.join(lacks)}" if lacks else "")


def play_schedule(schedule: Schedule, fixes: bool) -> list[Finding]:
    """Findings of a schedule played once."""
    with quiet():
        from kvfix_tools.lab.play import play as run

        kvfix.revert()
        if fixes:
            kvfix.apply()
        try:
            return [found for found in run(schedule).findings if found.verdict == "violated"]
        finally:
            kvfix.revert()


def play(scenario: Scenario, fixes: bool) -> Result:
    """Play it once. The choice of kvfix in this process is set for it, and gone afterwards."""
    if expected(scenario) == "not-applicable":
        why = cannot_play(scenario.options.connector) or f"needs {_missing(scenario.needs or {})}"
        return Result(scenario.slug, fixes, "not-applicable", why, [], [], [], {})
    with quiet():
        from kvfix_tools.lab.world import Died, World

        kvfix.revert()
        if fixes:
            kvfix.apply(only=[fix.code for fix in catalogue() if not fix.opt_in or fix.code in scenario.fixes])
        try:
            world = World(scenario.options)
            with suppress(Died):  # it is among the findings
                scenario.play(world)
        finally:
            kvfix.revert()
    hits = [
        found
        for found in world.findings
        if (found.code == scenario.rule and scenario.text in found.message) or found.code == FAULT
    ]
    also = [str(found) for found in world.findings if found not in hits]
    story = [(step, event) for step, event in world.log if event.request in (scenario.request, "")]
    outcome = "violated" if hits else "clean"
    message = str(hits[0]) if hits else ""
    return Result(scenario.slug, fixes, outcome, message, also, story, world.findings, world.counts)


@contextmanager
def quiet() -> Iterator[None]:
    """The engine's own log lines are not the lab's output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
