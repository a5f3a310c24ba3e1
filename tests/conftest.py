"""Provide tests with releases of LMCache, fresh processes, and forks of a process that has imported vLLM."""

import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import filelock
import pytest

from tests import fork_server as forks
from tests import quick
from tests.quick import (  # noqa: F401  hooks of pytest
    pytest_addoption,
    pytest_configure,
    pytest_ignore_collect,
    pytest_runtest_call,
    pytest_terminal_summary,
)

ROOT = Path(__file__).parent.parent
RELEASES = Path(os.environ.get("KVFIX_TEST_RELEASES", ROOT / ".cache/lmcache"))
ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"

#: Tests start programs without these variables. LMCache itself sets PROMETHEUS_MULTIPROC_DIR.
_OURS = ("KVFIX", "VLLM_PLUGINS", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "PROMETHEUS_MULTIPROC_DIR")


def release_names() -> list[str]:
    return (ROOT / "requirements/lmcache-releases.txt").read_text().split()


def release(name: str) -> Path:
    """Return the folder of an unpacked LMCache release. The caller puts this folder first on sys.path."""
    path = RELEASES / name
    assert (path / "lmcache").is_dir(), f"{path} is missing: run `make install`"
    return path


PLUGIN = ROOT / "tests/engine/plugin"


def clean_environment(*first: Path, **changes: str) -> dict[str, str]:
    """Return a program's environment without the variables in _OURS. first: folders to put first on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    places = [*first, *([quick.SITE] if quick.VARIABLE in os.environ else []), ROOT / "patches", ROOT / "tools"]
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, places)), **changes}


class Fresh:
    """Runs code in a fresh interpreter for at most `limit` seconds. The code must assign a JSON value to `result`."""

    def __init__(self, limit: float | None = 300) -> None:
        self._limit = limit

    def __call__(self, code: str, *flags: str, **settings: str) -> Any:
        done = self.run([sys.executable, *flags, "-c", f"{code}\nimport json; print(json.dumps(result))"], **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def run(self, command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env=clean_environment(**settings), capture_output=True, text=True, timeout=self._limit
        )
        quick.skip_if_wanted()
        return done


#: Folders with the longest tests. These tests run first, so that no worker of xdist starts a long test at the end.
LONG = ("engine", "verify", "upstream", "roundtrip", "lab", "release", "engine_state", "doctor", "runtime", "docs")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [*LONG, item.path.parent.name].index(item.path.parent.name))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make kvfix forget earlier errors, because kvfix reports each error once per process. Return the error counts."""
    from kvfix.session import session

    for name in ("faults", "reported", "lines", "tallies"):
        monkeypatch.setattr(session, name, {})
    return session.faults


@pytest.fixture(scope="session")
def fresh() -> Fresh:
    return Fresh()


#: The fixes to apply before a test: no fix (False), the fixes with these codes (a list), or the default fixes (True).
Fixes = bool | list[str]


def code_of(case: Callable[..., Any], arguments: tuple[Any, ...], fixes: Fixes) -> str:
    """Return Python code that imports the function `case`, applies the fixes, and calls the function."""
    apply = f"import kvfix; kvfix.apply(only={None if fixes is True else fixes})" if fixes is not False else ""
    load = f"from {case.__module__} import {case.__name__} as case\ncase = getattr(case, '__wrapped__', case)"
    return f"{load}\n{apply}\nresult = case(*{arguments!r})"


class ForkServer:
    """A process that has imported vLLM and torch, and has run the code `first`. Each call runs in a separate fork."""

    def __init__(self, first: str = "", **settings: str) -> None:
        self._connection, there = multiprocessing.Pipe()
        self._process = forks.start(forks.serve, there, first, clean_environment(**settings))
        there.close()

    def __call__(
        self, case: str | Callable[..., Any], lmcache: Path | None = None, *arguments: Any, fixes: Fixes = False
    ) -> Any:
        """Run `case` (a function, or code that sets `result`) with this LMCache first on sys.path. Return `result`."""
        code = case if isinstance(case, str) else code_of(case, arguments, fixes)
        self._connection.send({"code": code, "lmcache": str(lmcache or "")})
        answer = self._connection.recv()
        assert answer["error"] is None, answer["error"] + answer["printed"]
        return json.loads(answer["result"])

    def close(self) -> None:
        self._connection.close()
        self._process.join(30)


def run_forked(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a fork of a process that has imported vLLM. The program's output goes into the folder."""
    files = [folder / "stdout", folder / "stderr"]
    with open(files[0], "w") as stdout, open(files[1], "w") as stderr:
        process = forks.Forked(command, env=clean_environment(**environment), stdout=stdout, stderr=stderr, cwd=ROOT)
        code = process.wait(300)
    return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    process = ForkServer()
    yield process
    process.close()


def call(function: Callable[..., Any], *arguments: Any, fixes: Fixes = False) -> str:
    """Return code that prepares the lab and calls `function`. A fork has one thread, so torch must use one thread."""
    return f"""
import torch
torch.set_num_threads(1)
from kvfix_tools.lab import runner
runner.prepare(None)
with runner.quiet():
{indent(code_of(function, arguments, fixes), "    ")}
"""


#: The newest LMCache. Most tests run in forks of a process that has imported this LMCache, which saves 1 s per fork.
NEWEST = RELEASES / "0.5.6"
WARM = f"""
from kvfix_tools.lab import runner
runner.prepare({str(NEWEST)!r})
with runner.quiet():
    import lmcache.integration.vllm.lmcache_mp_connector
    import lmcache.integration.vllm.vllm_v1_adapter
    from kvfix_tools.lab.connectors import mooncake, mp, nixl, offloading, simple_offload, v1
"""


class Once:
    """Runs a function once, in a fork, for all processes of pytest. Returns the result, or fails with the error."""

    def __init__(self, fork_server: ForkServer, warm: ForkServer, answers: Path) -> None:
        self._fork_server, self._warm = fork_server, warm
        self._answers = answers
        self._read: dict[str, tuple[Any, str]] = {}

    def __call__(self, function: Callable[..., Any], lmcache: Path, *arguments: Any, fixes: Fixes = False) -> Any:
        code = call(function, *arguments, fixes=fixes)
        name = hashlib.sha256(f"{lmcache} {code}".encode()).hexdigest()
        answer = self._answers / f"{name}.json"
        if name not in self._read:
            with filelock.FileLock(answer.with_suffix(".lock")):
                if not answer.exists():
                    answer.write_text(json.dumps(self._asked(code, lmcache)))
            self._read[name] = json.loads(answer.read_text())
        result, error = self._read[name]
        assert not error, error
        return result

    def both(self, function: Callable[..., Any], lmcache: Path, *arguments: Any) -> list[Any]:
        return [self(function, lmcache, *arguments, fixes=each) for each in (False, True)]

    def _asked(self, code: str, lmcache: Path) -> tuple[Any, str]:
        try:
            return (self._warm(code) if lmcache == NEWEST else self._fork_server(code, lmcache)), ""
        except AssertionError as error:
            return None, str(error)[-4000:]


@pytest.fixture(scope="session")
def once(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Once]:
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of an xdist worker is inside the folder of the pytest run
        shared = shared.parent
    answers = shared / "answers"
    answers.mkdir(exist_ok=True)
    warm = ForkServer(WARM)
    yield Once(fork_server, warm, answers)
    warm.close()


def answers(*expected: Any, also: str = "", **fixed: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn a function into a test that runs the function in a fork and compares the result with `expected`.

    - expected: one result, or two results (first without, then with fixes). Default: the test's parameter `answer`
    - also: more parameters of the test (`fixes`, `release` or `answer`), separated by spaces
    - fixed: values of `fixes` and `release`. Default: release 0.5.6, and for the second result the default fixes
    """

    def make(case: Callable[..., Any]) -> Any:
        names = list(inspect.signature(case).parameters)

        @functools.wraps(case)
        def test(once: Once, **parameters: Any) -> None:
            given = {"fixes": len(expected) > 1, "release": "0.5.6", **fixed, **parameters}
            right, fixes = list(expected or [given["answer"]]), given["fixes"]
            arguments = [given[name] for name in names]
            ways = [False, fixes][-len(right) :]
            assert [once(case, release(given["release"]), *arguments, fixes=each) for each in ways] == right

        of_test = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("once", *names, *also.split())]
        vars(test)["__signature__"] = inspect.Signature(of_test)
        return test

    return make


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, once: Once) -> Any:
    return once(request.module.play_all, NEWEST)
