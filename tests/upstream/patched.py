"""A release with a patch on it, and what is asked of it in a process of its own.

The patched copy is thin: the touched files are real, what lies beside them are links to the release.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def touched(patch: str) -> list[str]:
    """Files that the patch changes or makes."""
    return [line.partition(" b/")[2] for line in patch.splitlines() if line.startswith("diff --git a/")]


def apply(patch: Path, release: Path, folder: Path) -> Path:
    """`folder` as a copy of the release with the patch on it; AssertionError where it does not apply cleanly."""
    folder.mkdir()
    for file in touched(patch.read_text()):
        if (release / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(release / file, folder / file)
    done = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=folder, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def link(release: Path, folder: Path) -> None:
    """Links beside the touched files of a package, so that it can be imported from `folder`."""
    for parent in sorted({parent for file in folder.rglob("*.py") for parent in file.relative_to(folder).parents}):
        if (release / parent).is_dir() and "tests" not in parent.parts:
            for beside in (release / parent).iterdir():
                if not (folder / parent / beside.name).exists() and beside.name != "__pycache__":
                    (folder / parent / beside.name).symlink_to(beside)


def prefer(folder: Path) -> None:
    """In a process that has imported the release: what the patch touches is imported from the folder, anew.

    So is whatever of LMCache, vLLM's connectors and the lab imports it.
    """
    for name, module in list(sys.modules.items()):
        place = folder / name.replace(".", "/")
        if "__path__" in vars(module) and place.is_dir() and not place.is_symlink():
            if isinstance(module.__path__, list):
                module.__path__.insert(0, str(place))
            else:  # a namespace package
                module.__path__ = [str(place), *module.__path__]
    gone = {name for name in sys.modules if _is_touched(folder / f"{name.replace('.', '/')}.py")}
    imports = {name: _imports(sys.modules[name]) for name in sys.modules if name.startswith(_OURS)}
    while more := {name for name, wanted in imports.items() if name not in gone and wanted & gone}:
        gone |= more
    for name in gone:
        del sys.modules[name]
    registry = sys.modules["prometheus_client"].REGISTRY  # LMCache registers what is there already, and would fail
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)


_OURS = ("lmcache.", "kvfix_tools.lab.", "vllm.distributed.kv_transfer.kv_connector.")


def _is_touched(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def _imports(module: Any) -> set[str]:
    """Names of modules that this one imports anywhere, and of what might be one."""
    file = Path(getattr(module, "__file__", None) or os.devnull)
    if file.suffix != ".py" or file.name == "__init__.py":  # a package is what its modules are
        return set()
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def regression(folder: Path, tests: list[str]) -> dict[str, Any]:
    """Outcome of each regression test file of the folder: {file: [passed, failed]}."""
    import pytest

    class Count:
        def __init__(self) -> None:
            self.passed = self.failed = 0
            self.said = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.passed and report.when == "call"
            self.failed += report.failed
            self.said += report.longreprtext[-1500:] if report.failed else ""

        def pytest_collectreport(self, report: Any) -> None:
            self.failed += report.failed
            self.said += str(report.longrepr)[-1500:] if report.failed else ""

    found = {}
    for file in tests:
        count = Count()
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-c", os.devnull, "--rootdir", str(folder)]
        pytest.main([*options, str(folder / file)], plugins=[count])
        found[file] = [count.passed, count.failed, count.said]
    return found


def verdicts(code: str, dist: str) -> dict[str, str]:
    """{function: kvfix's verdict} of the patched copy, by fingerprint and probe."""
    from importlib import import_module

    from kvfix import fix, verdict

    known = fix.find(code)
    assert known is not None
    return {
        patch.function: ": ".join(verdict.judge_live(patch, import_module(patch.module)))
        for patch in known.patches
        if patch.dist == dist
    }


def scenarios(code: str) -> dict[str, str]:
    """{scenario of the fix: what comes of it here, without kvfix}; only those that the release would violate."""
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.scenario import scenarios as known

    played = {}
    for scenario in known():
        if code in scenario.fixes and runner.expected(scenario) == "violated":
            result = runner.play(scenario, fixes=False)
            played[scenario.slug] = f"{result.outcome} {result.message}".strip()
    return played


def healthy(connector: str, seeds: int) -> list[str]:
    """What happens in plain schedules: a digest of all events of each, "" where something is violated."""
    import hashlib

    from kvfix_tools.lab import runner

    with runner.quiet():
        from kvfix_tools.lab.play import play
        from kvfix_tools.lab.schedule import draw

        digests = []
        for seed in range(seeds):
            done = play(draw(seed, connector, plain=True))
            wrong = any(found.verdict == "violated" and found.code != "KVR009" for found in done.findings)
            events = [(step, *event) for step, event in done.log if type(event).__name__ != "Left"]
            digests.append("" if wrong else hashlib.sha256(repr(events).encode()).hexdigest())
        return digests
