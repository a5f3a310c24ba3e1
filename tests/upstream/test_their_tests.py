"""Upstream's own tests of the files that a patch changes: those that pass on the release pass with the patch.

`make peers` runs them: they take a quarter of an hour.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfix_tools import upstream
from maintain import peers
from tests.conftest import ForkServer
from tests.upstream import patched
from tests.upstream.test_patches import PATCHES, released, released_tests

pytestmark = pytest.mark.peers

#: If more test files than this import a changed module, only those named after a changed file run.
MANY = 20
#: Depends on time, and fails on a busy machine. `python -m maintain.peers` runs it, and again alone where it fails.
TIMED = "tests/v1/lookup_client/test_lmcache_lookup_client.py"


def theirs(row: upstream.Ready) -> list[str]:
    """Upstream's tests of the changed files: those that import one; if they are many, those named after one."""
    if not released_tests(row).is_dir():
        return []
    files = [Path(file) for file in patched.touched(row.path.read_text()) if not file.startswith("tests/")]
    modules = [".".join(file.with_suffix("").parts) for file in files]
    found = [path for path in peers.importing(row.dist, released_tests(row), modules) if path != TIMED]
    named = {f"test_{file.stem}" for file in files}
    return found if len(found) <= MANY else [path for path in found if Path(path).stem in named]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A process without network for upstream's tests, which look up models."""
    process = ForkServer(**peers.environment(tmp_path_factory.mktemp("peers")))
    yield process
    process.close()


@pytest.mark.parametrize("row", [row for row in PATCHES if theirs(row)], ids=lambda row: f"{row.slug}-{row.dist}")
def test_their_tests(row: upstream.Ready, offline: ForkServer, tmp_path: Path) -> None:
    """Upstream's tests of the changed files: those that pass on the release pass with the patch."""
    known = peers.baseline(peers.suite(row.dist))["not passed"]
    patched.copy(row.path, released(row), tmp_path / "released")
    folder = patched.apply(row.path, released(row), tmp_path / "patched")

    def failing(folder: Path, tests: list[str]) -> set[str]:
        patched.link(released(row), folder)
        found = offline(patched.theirs, folder, str(folder), row.dist, tests)
        assert found, f"{tests} do not run"
        return {name for name, outcome in found.items() if outcome == "failed"} - known.keys()

    for file in {
        name.partition("::")[0] for name in failing(folder, theirs(row))
    }:  # one file at a time: some disturb others
        assert failing(folder, [file]) <= failing(tmp_path / "released", [file])
