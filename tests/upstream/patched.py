"""Make a patched copy of a release, and test the copy. Files that the patch does not change are links."""

import ast
import functools
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvfix import applicability, catalogue, installed_source
from kvfix.fixes.record import Target
from kvfix.ledger.events import Asked
from maintain import peers
from tests.healthy import events, violated

#: Seeds of random schedules without faults. With LMCache 0.3.10, all schedules but that of seed 22 violate a rule.
SEEDS = (*range(3), 22)
FAULTY = 3
#: {fix: other fixes to apply with this fix}. Without KVF322, requests in the scenarios of KVF325 never end.
BESIDE = {"KVF325": ["KVF322"]}


def touched(patch: str) -> list[str]:
    return [line.partition(" b/")[2] for line in patch.splitlines() if line.startswith("diff --git a/")]


def copy(patch: Path, released: Sequence[Path], folder: Path) -> None:
    """Copy into `folder` each released file (of the package or of its tests) that the patch changes."""
    for file in touched(patch.read_text()):
        for place in released:
            if (place / file).exists():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(place / file, folder / file)


def apply(patch: Path, released: Sequence[Path], folder: Path) -> Path:
    git_apply(patch, released, folder)
    link(released, folder)
    return folder


def git_apply(patch: Path, released: Sequence[Path], folder: Path, *options: str) -> str:
    """Copy into `folder` the files that the patch changes, and patch the copies. Return the output of git."""
    folder.mkdir(parents=True, exist_ok=True)
    copy(patch, released, folder)
    done = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=folder, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def link(released: Sequence[Path], folder: Path) -> None:
    """Link into `folder` the unpatched tests, and the unpatched files of each package that has a patched file."""
    release, *tests = released
    (folder / "tests").mkdir(exist_ok=True)
    parents = {parent for file in folder.rglob("*.py") for parent in file.relative_to(folder).parents}
    # Add no links directly in `folder`, because Python imports all other packages from the release.
    for parent in sorted(parents - {Path()} | {Path("tests")}):
        for place in tests if parent.parts[0] == "tests" else [release]:
            for other in (place / parent).iterdir() if (place / parent).is_dir() else ():
                if not (folder / parent / other.name).exists() and other.name != "__pycache__":
                    (folder / parent / other.name).symlink_to(other)


def prefer(folder: Path) -> None:
    """Unload each module that has a copy in `folder`, and modules of _OURS that import an unloaded module.

    The next import of an unloaded module loads the copy, if there is a copy.
    """
    for name, module in list(sys.modules.items()):
        place = folder / name.replace(".", "/")
        if "__path__" in vars(module) and place.is_dir() and _is_own(place, folder) and not _is_test(name):
            if isinstance(module.__path__, list):
                module.__path__.insert(0, str(place))
            else:  # a namespace package
                module.__path__ = [str(place), *module.__path__]
    files = {name: folder / f"{name.replace('.', '/')}.py" for name in sys.modules}
    gone = {name for name, file in files.items() if file.is_file() and _is_own(file, folder)}
    if any(name.startswith(_NIXL) for name in gone):
        gone |= {name for name in sys.modules if name.startswith(_NIXL)}
    gone |= sys.modules.keys() & {_MOONCAKE}
    imports = _imports_of_ours()
    while more := {name for name, wanted in imports.items() if name not in gone and wanted & gone}:
        gone |= more
    for name in gone:
        del sys.modules[name]
        package, _, module_name = name.rpartition(".")
        if package in sys.modules:  # remove the attribute too, or `from package import module` finds the old module
            vars(sys.modules[package]).pop(module_name, None)
    registry = sys.modules["prometheus_client"].REGISTRY  # LMCache would register its metrics a second time, and fail
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)


_OURS = (
    "lmcache.", "kvfix_tools.lab.", "vllm.distributed.kv_transfer.kv_connector.", "vllm.v1.core.",
    "vllm.v1.kv_offload.", "vllm.v1.simple_kv_offload.", "vllm.v1.kv_cache_spec_registry",
)  # fmt: skip
#: `prefer` unloads this whole package, because its modules re-export names, and the lab has replaced time and threads.
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
#: The lab has replaced asyncio and the settings of this module. These replacements make upstream's tests wait minutes.
_MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


def _is_test(module: str) -> bool:
    return module.partition(".")[0] == "tests"


def _is_own(path: Path, folder: Path) -> bool:
    """Return True if the path is neither a link to the release nor below a link."""
    return path.resolve().is_relative_to(folder.resolve())


@contextmanager
def fuzzer(fixes: Sequence[str] = ()) -> Iterator[Any]:
    """Apply these fixes. Yield the lab's functions `draw` and `play` for schedules. The engines log nothing."""
    from kvfix_tools.lab import runner

    with runner.applied(bool(fixes), only=list(fixes)):
        from kvfix_tools.lab.fuzz.fuzz import play
        from kvfix_tools.lab.fuzz.schedule import draw

        yield draw, play


def prepare(lmcache: str, connectors: list[str]) -> None:
    """Import the lab and play each connector, before this process forks. lmcache: folder of the LMCache release."""
    from kvfix_tools.lab import runner

    runner.prepare(lmcache)
    with fuzzer() as (draw, play):
        for connector in connectors:
            play(draw(0, connector, plain=True))
    _imports_of_ours()  # cached for all forks


def tried(folder: str, dist: str, tests: list[str], code: str, played: list[str], fixes: list[str]) -> dict[str, Any]:
    """Test the release in `folder`, and return results. code: the fix that the patch replaces, or "" for no patch."""
    place = Path(folder)
    prefer(place)
    found: dict[str, Any] = {}
    if tests:
        found["regression"] = regression(place, tests)
    if code:
        found["status"] = status_of(code, dist)
        found |= plays(code, played, BESIDE.get(code, []))
    found["healthy"] = {each: healthy(each, fixes) for each in played}
    return found


def plays_with_fixes(wanted: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return {code of a fix: digests of plays() with the fix}. wanted: {code of a fix: connectors to play}."""
    return {code: plays(code, played, [code, *BESIDE.get(code, [])])["digests"] for code, played in wanted.items()}


def _imports_of_ours() -> dict[str, frozenset[str]]:
    """Return the imports of each loaded module of _OURS. `prefer` unloads modules that import an unloaded module."""
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sys.modules if name.startswith(_OURS)}
    return {name: _imports(Path(file or os.devnull)) for name, file in files.items()}


@functools.cache
def _imports(file: Path) -> frozenset[str]:
    """Return the names of all modules and attributes that this file imports. Skip imports under TYPE_CHECKING."""
    if file.suffix != ".py" or file.name == "__init__.py":  # imports of __init__.py do not count
        return frozenset()
    found = set()
    for node in _run_nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(found)


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node
            yield from _run_nodes(node)


def regression(folder: Path, tests: list[str]) -> dict[str, Any]:
    """Return the counts of passed and failed tests, and messages, by file. Skip the failures recorded in peers.KEPT."""

    class Count:
        def __init__(self) -> None:
            self.found: dict[str, list[Any]] = {file: [0, 0, ""] for file in tests}

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            """Turn off LMCache's shared allocator (tests/conftest.py 0.5.6:785), which fills 5 GB in each process."""
            for item in items:
                item.add_marker("no_shared_allocator")

        def pytest_collectreport(self, report: Any) -> None:
            counts = self.found.get(report.nodeid.partition("::")[0])
            if counts is not None:
                counts[0] += report.passed and getattr(report, "when", "") == "call"
                counts[1] += report.failed
                counts[2] += report.longreprtext[-1500:] if report.failed else ""

        pytest_runtest_logreport = pytest_collectreport

    count = Count()
    known = {name for file in peers.KEPT.glob("*-*.json") for name in json.loads(file.read_text())["not passed"]}
    red = [f"--deselect={name}" for name in sorted(known) if name.partition("::")[0] in tests]
    # `pytest_asyncio.plugin` silently ends vLLM's tests of MooncakeConnector too early, so theirs() omits the plugin.
    _run(folder, ["-p", "pytest_asyncio.plugin", *red, *tests], plugins=[count])
    return count.found


def theirs(place: str, dist: str, tests: list[str]) -> dict[str, str]:
    """Run released test files in the folder `place`. Return the outcome of each test."""
    import torch

    torch.set_num_threads(1)  # a fork lacks the threads that its parent has started
    folder = Path(place)
    if dist == "vllm":  # vLLM is already imported
        prefer(folder)
    outcomes = folder / "outcomes"
    outcomes.unlink(missing_ok=True)
    os.environ.pop("PYTEST_XDIST_WORKER", None)  # with this variable of xdist, peers_plugin writes no outcomes
    os.environ["KVFIX_PEERS"] = json.dumps({"mode": "", "outcomes": str(outcomes), "dist": dist})
    _run(folder, ["-p", "maintain.peers_plugin", *tests], plugins=[])
    return peers.read(outcomes)


def _run(folder: Path, arguments: list[str], plugins: list[Any]) -> None:
    """Run pytest with upstream's package `tests` in place of kvfix's package `tests`."""
    import pytest

    own = {name: module for name, module in sys.modules.items() if _is_test(name)}
    for name in own:
        del sys.modules[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    wanted = [option for plugin in ("pytest_asyncio", "pytest_mock", "pytest_timeout") for option in ("-p", plugin)]
    # vLLM calls gc.unfreeze after each test (parallel_state.py 0.32.0:2535). Then the collector visits all old objects.
    with mock.patch.object(gc, "unfreeze"):
        pytest.main([*options, *wanted, "--timeout=60", *arguments], plugins=plugins)
    for name in list(filter(_is_test, sys.modules)):
        del sys.modules[name]
    sys.path[:] = path
    sys.modules.update(own)


def status_of(code: str, dist: str) -> str:
    """Return kvfix's status of a fix, by fingerprint and probe. This process has imported the patched copy."""

    def judge(target: Target) -> applicability.Applicability:
        if installed_source.source_file(target.dist, target.module) is None:  # this release does not have the module
            return applicability.judge(target)
        return applicability.judge_live(target, import_module(target.module))

    (row,) = (row for row in catalogue.rows_of(catalogue.find(code), judge) if row.dist == dist)
    return f"{row.verdict}: {row.reason}"


def plays(code: str, connectors: list[str], fixes: list[str]) -> dict[str, dict[str, str]]:
    """Play random schedules, and the scenarios that show the fix's bug. Return outcomes and digests of the events."""
    from kvfix_tools.lab import runner
    from kvfix_tools.lab.scenario import scenarios

    mine = [each for each in scenarios() if code in each.fixes and each.options.connector in connectors]
    played = [runner.play(each, bool(fixes), fixes) for each in mine if runner.expected(each) == "violated"]
    digests = {each.slug: _digest(_events(each)) for each in played}
    with fuzzer(fixes) as (draw, play):
        for connector in connectors:
            digests |= {f"{connector} {seed}": _digest(_events(play(draw(seed, connector)))) for seed in range(FAULTY)}
    return {"outcomes": {each.slug: f"{each.outcome} {each.message}".strip() for each in played}, "digests": digests}


def _events(done: Any) -> list[tuple[Any, ...]]:
    """Return all events. Set `hit` to 0 in each lookup that promises 0 tokens.

    So the events do not show whether the connector asked its cache before the connector promised 0 tokens.
    """
    log = [
        (step, event._replace(hit=0) if isinstance(event, Asked) and event.promised == 0 else event)
        for step, event in done.log
    ]
    return events(SimpleNamespace(log=log))


def _digest(events: list[Any]) -> str:
    return hashlib.sha256(repr(events).encode()).hexdigest()


def healthy(connector: str, fixes: list[str]) -> list[str]:
    """Play plain schedules with these fixes. Return a digest of each schedule's events, or "" if a rule is violated."""
    with fuzzer(fixes) as (draw, play):
        played = [play(draw(seed, connector, plain=True)) for seed in SEEDS]
    return ["" if violated(each) else _digest(events(each)) for each in played]
