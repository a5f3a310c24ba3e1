"""Each patch for upstream applies to the released code, fixes the bug, and has a test that fails without the patch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from kvfix import applicability, catalogue, installed_source
from kvfix_tools import upstream
from kvfix_tools.lab.options import PAIRS
from kvfix_tools.lab.scenario import scenarios
from maintain import peers
from tests.conftest import RELEASES, ROOT, ForkServer, call, release_names
from tests.diagnose.lines import site_packages
from tests.healthy import changing
from tests.lab import test_async_release
from tests.upstream import patched

#: The newest LMCache with which vLLM's copy of the multi-process connector works.
FOR_IN_TREE = "0.4.6"
#: {code prefix of vLLM fixes: the lab's connector that runs the fixed functions}. Longer prefixes come first.
OF_VLLM = {"KVF33": "offloading", "KVF373": "v1", "KVF37": "simple-offload"}
#: {fix of LMCache's cache engine: mode of test_async_release that shows the bug}. The lab replaces the cache engine.
ENGINE = {"KVF013": "async", "KVF018": "layers"}
#: Reasons why a patch and its fix give different events in scenarios or in random schedules with faults.
DIFFERS = {("KVF036", "lmcache"): "the patch also answers a lookup that is sent again after a timeout, as KVF011 does"}

#: The process of a release runs this code once, for all patches.
FIRST = "from tests.upstream import patched; patched.prepare({lmcache!r}, {connectors!r})"


def released_tests(row: upstream.Ready) -> Path:
    """Return the folder with the tests of the release. Only the installed releases have this folder."""
    return ROOT / ".cache/peers" / f"{row.dist}-{row.version}"


def released(row: upstream.Ready) -> tuple[Path, Path]:
    return RELEASES / row.version if row.dist == "lmcache" else site_packages(), released_tests(row)


def lmcache_of(row: upstream.Ready) -> str:
    if row.dist == "lmcache":
        return row.version
    return FOR_IN_TREE if row.code < "KVF200" else release_names()[-1]


def connectors(row: upstream.Ready) -> list[str]:
    if row.code < "KVF100":
        return ["v1"]
    if row.code < "KVF200":
        return ["mp"] if row.dist == "lmcache" else ["mp-in-tree"]
    for prefix, connector in OF_VLLM.items():
        if row.code.startswith(prefix):
            return [connector]
    mine = {each.options.connector for each in scenarios() if each.slug in catalogue.find(row.code).scenarios}
    return sorted(mine.intersection(PAIRS)) or ["mp", "v1"]


PATCHES = sorted(upstream.ready(), key=lmcache_of)
IDS = [f"{row.slug}-{row.dist}-{row.version}" for row in PATCHES]


class Release:
    """A process that has imported one LMCache release and the lab. unpatched: results without patches."""

    def __init__(self, lmcache: str, scratch: Path) -> None:
        rows = [row for row in PATCHES if lmcache_of(row) == lmcache]
        played = sorted({each for row in rows for each in connectors(row)})
        first = FIRST.format(lmcache=str(RELEASES / lmcache), connectors=played)
        self.fork_server = ForkServer(first, **peers.environment(scratch))
        tests = []
        for row in rows:
            patched.git_apply(row.path, released(row), scratch / row.slug / row.dist)
            for file in regression_tests(row):
                (scratch / file).parent.mkdir(parents=True, exist_ok=True)
                (scratch / file).write_text((scratch / row.slug / row.dist / file).read_text())
                tests.append(file)
        for row in rows:
            patched.link(released(row), scratch)
        self.scratch = scratch
        self.unpatched = self.ask(scratch, "", tests, "", played)
        wanted = {row.code: connectors(row) for row in rows}
        self.with_fix: dict[str, Any] = self.fork_server(patched.plays_with_fixes, None, wanted)

    def ask(
        self, folder: Path, dist: str, tests: list[str], code: str, played: list[str], fixes: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        return dict(self.fork_server(patched.tried, None, str(folder), dist, tests, code, played, list(fixes)))

    def plays(self, connector: str, code: str) -> list[str]:
        """Return digests of healthy schedules without the patch. Apply the fix if the fix changes healthy schedules."""
        if code not in changing(connector):
            return list(self.unpatched["healthy"][connector])
        return list(self.ask(self.scratch, "", [], "", [connector], (code,))["healthy"][connector])


def regression_tests(row: upstream.Ready) -> list[str]:
    touched = (Path(file) for file in patched.touched(row.path.read_text()))
    return [str(file) for file in touched if file.parts[0] == "tests" and file.name.startswith("test_")]


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Yield one release at a time, because the process of a release needs almost a gigabyte."""
    made = Release(request.param, tmp_path_factory.mktemp("unpatched"))
    yield made
    made.fork_server.close()


@pytest.mark.parametrize(
    ("release", "row"), [(lmcache_of(row), row) for row in PATCHES], indirect=["release"], ids=IDS, scope="module"
)
def test_on_the_release(release: Release, row: upstream.Ready, tmp_path: Path) -> None:
    tests = regression_tests(row)
    assert tests, "a patch has a regression test"
    folder = patched.apply(row.path, released(row), tmp_path / "patched")
    before, found = release.unpatched, release.ask(folder, row.dist, tests, row.code, connectors(row))
    for file in tests:
        passed, failed, messages = found["regression"][file]
        assert passed, messages
        assert not failed, messages
    can_fail = [file for file in tests if before["regression"][file][1]]
    assert can_fail, "the tests pass without the change"
    added = {file for file in tests if not (released_tests(row) / file).exists()}
    assert added <= set(can_fail), "a new test passes without the change"
    # No release has the patched code. So kvfix refuses the fix if no probe can check this code.
    assert found["status"].startswith("refused" if has_no_probe(row) else "fixed-upstream"), found["status"]
    outcomes = set(found["outcomes"].values())
    assert outcomes == ({"clean"} if catalogue.find(row.code).scenarios else set()), found["outcomes"]
    with_fix = release.with_fix[row.code]
    differ = [name for name in with_fix if found["digests"][name] != with_fix[name]]
    assert bool(differ) == ((row.code, row.dist) in DIFFERS), f"{differ} play differently with kvfix's fix"
    for connector, digests in found["healthy"].items():
        played = zip(patched.SEEDS, digests, release.plays(connector, row.code), strict=True)
        healthy = [(seed, digest == right) for seed, digest, right in played if right]
        changed = [seed for seed, is_equal in healthy if not is_equal]
        assert healthy
        assert not changed, f"{connector}: schedules {changed} of `kvfix lab fuzz` play differently"


@pytest.mark.parametrize("row", [row for row in PATCHES if row.code in ENGINE], ids=lambda row: str(row.slug))
def test_chunks_after_one_load(row: upstream.Ready, fork_server: ForkServer, tmp_path: Path) -> None:
    folder, mode = patched.apply(row.path, released(row), tmp_path / "patched"), ENGINE[row.code]
    found = fork_server(call(test_async_release.after_one_load, mode, 0), folder)
    assert found == [64, [test_async_release.right(mode)]]


def has_no_probe(row: upstream.Ready) -> bool:
    mine = [target for target in catalogue.find(row.code).targets if target.dist == row.dist and not target.helper]
    return any(target.probe is None for target in mine if row.version in SpecifierSet(target.broken))


def test_every_fix_has_a_patch_or_a_reason() -> None:
    """Check the installed releases, which are the newest. A function that is right in these releases needs no patch."""
    wrong = {
        (known.code, target.dist)
        for known in catalogue.fixes()
        for target in known.targets
        if not target.helper and applicability.judge(target).state == "applicable"
    }
    ready = {(row.code, row.dist) for row in PATCHES if row.version == installed_source.version(row.dist)}
    without = {(fix.code, dist) for fix in catalogue.fixes() for dist in fix.no_patch}
    assert ready == wrong - without
    assert without <= wrong
    assert all(row.subject.startswith("[Bugfix]") for row in PATCHES)


def test_no_such_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert upstream.export("no-such", tmp_path) == 2
    assert "no patch for 'no-such'. " in capsys.readouterr().err


#: If more than MANY test files import a changed module, run only the test files named after a changed file.
MANY = 20
#: `theirs` leaves out these tests, which fail on a busy host. `python -m maintain peers` repeats a failed test.
TIMED = "tests/v1/lookup_client/test_lmcache_lookup_client.py"


def theirs(row: upstream.Ready) -> list[str]:
    """Return upstream's test files that import a changed file. If more than MANY files do, select files by name."""
    if not released_tests(row).is_dir():
        return []
    files = [Path(file) for file in patched.touched(row.path.read_text()) if not file.startswith("tests/")]
    modules = [".".join(file.with_suffix("").parts) for file in files]
    found = [path for path in peers.importing(row.dist, released_tests(row), modules) if path != TIMED]
    named = {f"test_{file.stem}" for file in files}
    return found if len(found) <= MANY else [path for path in found if Path(path).stem in named]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Yield a process without network for upstream's tests, because these tests look up models."""
    process = ForkServer(**peers.environment(tmp_path_factory.mktemp("peers")))
    yield process
    process.close()


@pytest.mark.peers
@pytest.mark.parametrize("row", [row for row in PATCHES if theirs(row)], ids=lambda row: f"{row.slug}-{row.dist}")
def test_their_tests(row: upstream.Ready, offline: ForkServer, tmp_path: Path) -> None:
    """Upstream's tests that pass on the release also pass with the patch. `make peers` runs this test."""
    known = peers.baseline(peers.suite(row.dist))["not passed"]
    patched.copy(row.path, released(row), tmp_path / "released")
    folder = patched.apply(row.path, released(row), tmp_path / "patched")

    def failing(folder: Path, tests: list[str]) -> set[str]:
        patched.link(released(row), folder)
        found = offline(patched.theirs, folder, str(folder), row.dist, tests)
        assert found, f"{tests} do not run"
        return {name for name, outcome in found.items() if outcome == "failed"} - known.keys()

    # Run each file alone, because files disturb each other. A red test runs again, as in peers.compare.
    for file in {name.partition("::")[0] for name in failing(folder, theirs(row))}:
        if red := sorted(failing(folder, [file])):
            assert failing(folder, red) <= failing(tmp_path / "released", red)
