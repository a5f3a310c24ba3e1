"""A pytest plugin: `pytest --kv-connector MODULE:CLASS` runs the scenarios and the fuzzer of `kvfix conform`.

Without the option `--kv-connector`, the plugin imports only pytest.
"""

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvfix_tools.conform.verdicts import Run

_FUZZER = "fuzzer"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvfix", "test a KV connector against vLLM's connector interface")
    group.addoption("--kv-connector", metavar="MODULE:CLASS", help="test this class, or a connector name of vLLM")
    group.addoption("--kv-config", metavar="JSON", default="{}", help="kv_connector_extra_config as JSON, or @FILE")
    group.addoption("--kv-lose", metavar="MODULE:FUNCTION", default="", help="call this function to delete stored KV")
    group.addoption("--kv-seconds", metavar="SECONDS", type=float, default=20.0, help="fuzz for this many seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """After all other tests, add a test for each scenario and a test for the fuzzer."""
    if config.getoption("--kv-connector"):
        from kvfix_tools.conform.scenarios import SCENARIOS

        names = [*(scenario.name for scenario in SCENARIOS), _FUZZER]
        items += [Contract.from_parent(session, name=name) for name in names]


class Broken(Exception):
    """The connector violates a rule of the contract, or the fuzzer has tested nothing."""


class Contract(pytest.Item):
    """A test that runs one scenario or the fuzzer."""

    def runtest(self) -> None:
        run = _run(self.config)
        known, reason = set(run.found), ""
        if self.name == _FUZZER:
            run.fuzz(self.config.getoption("--kv-seconds"), itertools.count())
            if run.tested_nothing:
                raise Broken(run.tested_nothing)
        else:
            case = run.scenario(self.name)
            if case.outcome == "not applicable":
                pytest.skip(case.reason)
            if case.outcome == "violated":
                reason = f"{case.reason}\n(an earlier scenario shows this violation in full)"
        broken = [
            "\n  ".join([f"{one.rule}: {one.message}", "shortest schedule:", *one.schedule, "history:", *one.history])
            for key, one in run.found.items()
            if key not in known
        ]
        if broken or reason:
            raise Broken("\n\n".join(broken) or reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if excinfo.errisinstance(Broken) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return "kvfix-conform", None, f"{self.config.getoption('--kv-connector')}: {self.name}"


@functools.cache
def _run(config: pytest.Config) -> "Run":
    """Return the run of this session. The first call imports vLLM, and applies kvfix's fixes until the session ends."""
    from kvfix_tools.conform import command

    settings = command.read_config(config.getoption("--kv-config"))
    command.prepare()
    from kvfix_tools.conform.player import Subject
    from kvfix_tools.conform.verdicts import Run

    fixes = contextlib.ExitStack()
    fixes.enter_context(command.chosen(fixes=True))
    config.add_cleanup(fixes.close)
    return Run(Subject(config.getoption("--kv-connector"), settings, config.getoption("--kv-lose")))
