"""The patches for upstream on the released code: they apply, they cure, and their own tests can fail.

For each patch one process: the release with the patch on it, its regression test, kvfix's verdict, the fix's scenarios
and plain schedules. What the release says without the patches comes from one process for each release.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvfix
from kvfix_tools import upstream
from tests.conftest import RELEASES, Zygote
from tests.upstream import patched

PATCHES = upstream.ready()
IDS = [f"{row.slug}-{row.dist}-{row.version}" for row in PATCHES]
#: No stub shows these bugs in milliseconds: for code that no release has kvfix says that it does not know.
NO_PROBE = {"KVF013", "KVF016"}
#: A hook of vLLM's base class, right for others: kvfix waits there only for what its connector has marked.
BASE = ("KVConnectorBase_V1.handle_preemptions", "KVConnectorBase_V1.bind_connector_metadata")
SEEDS = 12

CHILD = """
from pathlib import Path
from kvfix_tools.lab import runner
from tests.upstream import patched
if {dist!r} == "vllm":
    patched.prefer(Path({folder!r}))
runner.prepare({lmcache!r})
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
    if row.code < "KVF100":
        return ["v1"]
    if row.code < "KVF200":
        return ["mp"] if row.dist == "lmcache" else ["mp-in-tree"]
    return ["v1", "mp-in-tree"]


def ask(zygote: Zygote, row: upstream.Ready, folder: Path, tests: list[str], code: str) -> dict[str, Any]:
    # vLLM's copy of the connector starts with LMCache 0.4.6.
    lmcache = folder if row.dist == "lmcache" else RELEASES / "0.4.6"
    text = CHILD.format(
        folder=str(folder), dist=row.dist, lmcache=str(lmcache), tests=tests, code=code,
        connectors=connectors(row), seeds=SEEDS,
    )  # fmt: skip
    found: dict[str, Any] = zygote(text)
    return found


@pytest.fixture(scope="module")
def released(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(row) -> what its release says to the regression tests and plain schedules, without a patch."""
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}

    def of(row: upstream.Ready) -> dict[str, Any]:
        key = (row.dist, row.version, str(connectors(row)))
        if key not in kept:
            rows = [each for each in PATCHES if (each.dist, each.version, str(connectors(each))) == key]
            folder = tmp_path_factory.mktemp("released")
            tests = []
            for each in rows:
                whole = patched.apply(each.path, release_of(each), tmp_path_factory.mktemp("patched"))
                for file in [file for file in patched.touched(each.path.read_text()) if file.startswith("tests/")]:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    (folder / file).write_text((whole / file).read_text())
                    tests.append(file)
            if row.dist == "lmcache":
                for name in release_of(row).iterdir():
                    (folder / name.name).symlink_to(name)
            kept[key] = ask(zygote, row, folder, tests, "")
        return kept[key]

    return of


@pytest.mark.parametrize("row", PATCHES, ids=IDS)
def test_on_the_release(row: upstream.Ready, released: Any, zygote: Zygote, tmp_path: Path) -> None:
    release = release_of(row)
    folder = patched.apply(row.path, release, tmp_path / "patched")
    patched.link(release, folder)
    tests = [file for file in patched.touched(row.path.read_text()) if file.startswith("tests/")]
    assert tests, "a patch has a regression test"
    found = ask(zygote, row, folder, tests, row.code)
    before = released(row)
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


def test_every_bug_of_the_newest_releases_has_a_patch() -> None:
    ready = {(row.code, row.dist) for row in PATCHES}
    wrong = {(row.code, row.dist) for row in kvfix.status() if row.verdict == "applicable"}
    assert wrong <= ready
    assert ready - wrong == {("KVF001", "lmcache")}  # it lives in 0.3.10 only, and is the reported one
