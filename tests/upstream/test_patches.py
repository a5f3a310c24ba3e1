"""The patches for upstream on the released code: they apply, they cure, and their own tests can fail.

For each patch one process: the release with the patch on it, its regression test, kvfix's verdict, the fix's scenarios
and plain schedules. What the release says without the patches comes from one process for each release.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvfix
from kvfix_tools import upstream
from tests.conftest import RELEASES, Zygote, clean_environment
from tests.upstream import patched

PATCHES = upstream.ready()
IDS = [f"{row.slug}-{row.dist}-{row.version}" for row in PATCHES]
#: No stub shows these bugs in milliseconds: for code that no release has kvfix says that it does not know.
NO_PROBE = {"KVF013", "KVF016"}
#: A hook of vLLM's base class, right for others: kvfix waits there only for what its connector has marked.
BASE = ("KVConnectorBase_V1.handle_preemptions", "KVConnectorBase_V1.bind_connector_metadata")
SEEDS = 12

#: What a process imports once, for all patches of a release.
FIRST = """
from kvfix_tools.lab import runner
runner.prepare({lmcache!r})
with runner.quiet():
    from kvfix_tools.lab.play import play
    from kvfix_tools.lab.schedule import draw
    for connector in {connectors!r}:
        play(draw(0, connector, plain=True))
"""
CHILD = """
from pathlib import Path
from tests.upstream import patched
patched.prefer(Path({folder!r}))
result = {{}}
result["regression"] = patched.regression(Path({folder!r}), {tests!r})
if {code!r}:
    result["verdicts"] = patched.verdicts({code!r}, {dist!r})
    result["scenarios"] = patched.scenarios({code!r})
result["healthy"] = {{connector: patched.healthy(connector, {seeds}) for connector in {connectors!r}}}
"""


def release_of(row: upstream.Ready) -> Path:
    """Where the released code is: a folder that holds the package."""
    if row.dist == "lmcache":
        return RELEASES / row.version
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def connectors(row: upstream.Ready) -> list[str]:
    """Those of the lab that run through what the patch changes."""
    if row.dist == "lmcache":
        return ["v1"] if row.code < "KVF100" else ["mp"]
    return ["mp-in-tree"]


class Release:
    """A process with one release imported, and what it says to the regression tests and plain schedules."""

    def __init__(self, row: upstream.Ready, scratch: Path) -> None:
        self.path = release_of(row)
        # vLLM's copy of the connector starts with LMCache 0.4.6.
        lmcache = RELEASES / ("0.4.6" if row.dist == "vllm" else row.version)
        played = sorted({each for other in PATCHES if _same(other, row) for each in connectors(other)})
        self.zygote = Zygote(FIRST.format(lmcache=str(lmcache), connectors=played))
        tests = []
        for other in (each for each in PATCHES if _same(each, row)):
            patched.apply(other.path, self.path, scratch / other.slug)
            for file in regression_tests(other):
                (scratch / file).parent.mkdir(parents=True, exist_ok=True)
                (scratch / file).write_text((scratch / other.slug / file).read_text())
                tests.append(file)
        self.unpatched = self.ask(scratch, row.dist, tests, "", played)

    def ask(self, folder: Path, dist: str, tests: list[str], code: str, played: list[str]) -> dict[str, Any]:
        text = CHILD.format(folder=str(folder), dist=dist, tests=tests, code=code, connectors=played, seeds=SEEDS)
        found: dict[str, Any] = self.zygote(text)
        return found


def _same(one: upstream.Ready, other: upstream.Ready) -> bool:
    return (one.dist, one.version) == (other.dist, other.version)


def regression_tests(row: upstream.Ready) -> list[str]:
    return [file for file in patched.touched(row.path.read_text()) if file.startswith("tests/")]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[upstream.Ready], Release]]:
    kept: dict[tuple[str, str], Release] = {}

    def of(row: upstream.Ready) -> Release:
        key = (row.dist, row.version)
        if key not in kept:
            kept[key] = Release(row, tmp_path_factory.mktemp("unpatched"))
        return kept[key]

    yield of
    for release in kept.values():
        release.zygote.close()


@pytest.mark.parametrize("row", PATCHES, ids=IDS)
def test_on_the_release(row: upstream.Ready, releases: Callable[[upstream.Ready], Release], tmp_path: Path) -> None:
    release, tests = releases(row), regression_tests(row)
    assert tests, "a patch has a regression test"
    folder = patched.apply(row.path, release.path, tmp_path / "patched")
    patched.link(release.path, folder)
    before, found = release.unpatched, release.ask(folder, row.dist, tests, row.code, connectors(row))
    for file in tests:
        passed, failed, said = found["regression"][file]
        assert passed, said
        assert not failed, said
        assert before["regression"][file][1], f"{file} passes without the change"
    for function, verdict in found["verdicts"].items():
        if function not in BASE:
            expected = ("unknown",) if row.code in NO_PROBE else ("fixed-upstream", "not-affected")
            assert verdict.startswith(expected), (function, verdict)
    assert set(found["scenarios"].values()) <= {"clean"}, found["scenarios"]
    for connector, digests in found["healthy"].items():
        pairs = zip(before["healthy"][connector], digests, strict=True)
        healthy = [seed for seed, (one, other) in enumerate(pairs) if one]
        differ = [seed for seed in healthy if digests[seed] != before["healthy"][connector][seed]]
        assert healthy
        assert not differ, f"{connector}: schedules {differ} of `kvfix lab fuzz` play differently"


def test_patches_are_of_fixes_that_are_needed() -> None:
    """What is right upstream needs no patch."""
    wrong = {(row.code, row.dist) for row in kvfix.status() if row.verdict == "applicable"}
    assert {(row.code, row.dist) for row in PATCHES} <= wrong
    assert all(row.subject.startswith("[Bugfix]") for row in PATCHES)


def test_export_is_signed_off_by_whoever_exports(tmp_path: Path) -> None:
    """And `git am` takes it, on a checkout of the released files."""
    row = PATCHES[0]
    folder, home = tmp_path / "checkout", tmp_path / "home"
    for file in patched.touched(row.path.read_text()):
        if (release_of(row) / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((release_of(row) / file).read_bytes())
    home.mkdir()
    environment = clean_environment(HOME=str(home), GIT_CONFIG_NOSYSTEM="1")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    export = (sys.executable, "-m", "kvfix_tools.cli", "upstream", "export", row.slug, "-o", str(tmp_path))
    done = run(*export)
    assert done.returncode == 2
    assert "git config --global user.name" in done.stderr
    for key, value in (("user.name", "Ada"), ("user.email", "ada@example.org")):
        run("git", "config", "--global", key, value)
    assert run(*export).returncode == 0
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "as released"]):
        assert run("git", *command).returncode == 0
    (patch,) = tmp_path.glob("*.patch")
    done = run("git", "am", str(patch))
    assert done.returncode == 0, done.stderr
    assert "Signed-off-by: Ada <ada@example.org>" in run("git", "log", "-1", "--format=%an%n%B").stdout


def test_no_such_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.export("no-such", None, None, tmp_path) == 2
    assert "there is no such patch; there are: " in capsys.readouterr().err
