"""`make quick` (pytest --quick) leaves out each test that imports torch, or starts a program that imports torch.

vLLM and LMCache import torch. In place of torch, Python imports without_torch/torch.py, which skips the test or ends
the program that the test started.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

WHY = "imports torch, vLLM or LMCache"
#: With --quick, pytest ignores these paths. Most of their tests run engines, build a release or the docs, or read all
#: releases.
LEFT_OUT = (
    "docs", "dump", "engine", "look", "release", "upstream", "commands/test_mcp.py", "diagnose/test_memory.py",
    "doctor/test_releases.py", "engine_state/test_look.py", "runtime/test_releases.py",
)  # fmt: skip
#: This variable holds the path of a file that a program creates when importing torch. The path ends in pytest's pid.
VARIABLE = "KVFIX_TEST_WANTS_TORCH"
#: The folder that comes first on PYTHONPATH in programs that tests start.
SITE = Path(__file__).with_name("without_torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out each test that {WHY}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        os.environ[VARIABLE] = str(Path(tempfile.gettempdir(), f"kvfix-wants-torch-{os.getpid()}"))
        sys.path.insert(0, str(SITE))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    names = (collection_path.name, f"{collection_path.parent.name}/{collection_path.name}")
    return True if config.getoption("--quick") and not set(names).isdisjoint(LEFT_OUT) else None


def skip() -> None:
    """Skip a test that is about to import vLLM, if pytest runs with --quick."""
    if VARIABLE in os.environ:
        pytest.skip(WHY)


def skip_if_wanted() -> None:
    """Skip the test if a program of the test has ended because the program imported torch."""
    with suppress(KeyError, FileNotFoundError):
        os.unlink(os.environ[VARIABLE])
        pytest.skip(WHY)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    try:
        yield
    finally:
        skip_if_wanted()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if terminalreporter.config.getoption("--quick"):
        count = sum(WHY in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
        others = ", ".join(f"tests/{each}" for each in LEFT_OUT)
        terminalreporter.write_line(f"quick: left out {count} tests, each of which {WHY}; and {others}")
