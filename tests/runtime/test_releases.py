"""Check the status of fixes on real files of every release and on edited copies. The version number must not matter."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import kvfix
from kvfix import catalogue
from kvfix.applicability import fingerprints
from tests.conftest import ADAPTER, RELEASES, Fresh, answers, release, release_names

FILE = Path(*ADAPTER.split(".")).with_suffix(".py")
BUG = "            return cached_num_hit_toks\n"  # this line of LMCache 0.3.10 is the bug that KVF001 fixes
FIXED = "            return max(0, cached_num_hit_toks - num_computed_tokens)\n"

STATUS = "import kvfix; result = {row.code: row for row in kvfix.status()}"
CODE, VERSION, STATE, REASON = 0, 3, 4, 5


def settled() -> dict[str, Any]:
    kvfix.apply()
    import_module(ADAPTER)
    return {row.code: row for row in kvfix.status()}


def copy(folder: Path, into: Path, edit: Callable[[str], str] = lambda text: text, version: str = "") -> Path:
    """Copy a release and edit the copied adapter. version: the version to write into the metadata ("": no change)."""
    (metadata,) = folder.glob("lmcache-*.dist-info")
    for part in (folder / "lmcache", metadata):
        shutil.copytree(part, into / part.name, copy_function=os.link)
    rewrite(into / FILE, edit)
    if version:
        claimed = re.compile(r"^Version: .*$", re.MULTILINE)
        rewrite(into / metadata.name / "METADATA", lambda text: claimed.sub(f"Version: {version}", text, count=1))
    return into


def rewrite(file: Path, edit: Callable[[str], str]) -> None:
    text = file.read_text()
    file.unlink()  # the file is a hard link to the release's file
    file.write_text(edit(text))


SURVEY = """
import sys, kvfix
from kvfix import catalogue
result = []
for name, folder in {folders!r}.items():
    sys.path.insert(0, folder)
    sys.path_importer_cache.clear()
    rows = [row for row in catalogue.rows() if row.dist == {dist!r}]
    assert rows and all(row.reason for row in rows) and {{row.version for row in rows}} == {{name}}
    result += rows
    sys.path.remove(folder)
"""


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    return list(Fresh()(SURVEY.format(folders={name: str(release(name)) for name in release_names()}, dist="lmcache")))


def undecided(rows: list[list[str]]) -> set[str]:
    found = [row for row in rows if row[STATE] in ("unknown", "refused", "unfixable")]
    assert all("cannot be fixed from outside: " in row[REASON] for row in found)
    return {row[CODE] for row in found}


def test_kvf001_on_every_release(rows: list[list[str]]) -> None:
    found = {row[VERSION]: row for row in rows if row[CODE] == "KVF001"}
    states = {**dict.fromkeys(release_names(), "fixed-upstream"), "0.3.10": "applicable"}
    states |= dict.fromkeys(("0.3.9", "0.3.9.post1", "0.3.9.post2"), "not-affected")
    assert {name: row[STATE] for name, row in found.items()} == states
    assert all(name in row[REASON] or "others up to" in row[REASON] for name, row in found.items())


def test_no_release_is_unknown_to_any_fix(rows: list[list[str]]) -> None:
    assert undecided(rows) <= {found.code for found in catalogue.fixes() if not found.fixable}


def test_no_release_of_vllm_is_unknown_to_any_fix(fresh: Fresh) -> None:
    folders = {path.parents[2].name: str(path) for path in RELEASES.parent.glob("vllm/*/lib/python*/site-packages")}
    if not folders:
        pytest.skip("no older vLLM is installed in .cache/vllm. `make matrix` installs older releases")
    assert undecided(fresh(SURVEY.format(folders=folders, dist="vllm"))) <= {"KVF903", "KVF905", "KVF906"}


@pytest.mark.parametrize("release", ["0.3.10", "0.4.6", "0.5.2", "0.5.3", "0.5.5", "0.5.6"])
@answers([], also="release")
def test_no_fix_is_refused_on_released_code() -> list[list[str]]:
    """In some releases, a fix's function is inherited, or the function's class has an older name in another file."""
    kvfix.apply()
    for module in catalogue.modules_of_fixes():
        with contextlib.suppress(Exception):  # some modules need missing packages, or another release
            import_module(module)
    return [[row.code, row.reason] for row in kvfix.status() if row.verdict in ("refused", "unknown")]


def test_an_unfixable_bug_can_be_harmless_here(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'import kvfix; kvfix.apply(); result = [row for row in kvfix.status() if row.code == "KVF901"][0]'
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    row = fresh(code)
    assert row[STATE] == "unfixable"
    assert "Set PYTHONHASHSEED=0 in the environment of every vLLM and LMCache process" in row[REASON]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fresh(code)[STATE] == "not-affected"


def test_code_of_broken_releases_is_broken_code_only() -> None:
    """Broken and right releases share no fingerprint of a function, because the fingerprint decides the status."""
    for found in catalogue.fixes():
        for target in found.targets:
            if target.helper:  # kvfix wraps a helper function, which has no bug, only for another function
                continue
            known = fingerprints()[target.dist]["functions"][target.name]
            broken = SpecifierSet(target.broken, prereleases=True)
            for fingerprint, releases in known.items():
                assert len({release in broken for release in releases}) == 1, (found.code, fingerprint, releases)
            assert any(release in broken for releases in known.values() for release in releases), found.code


def probed() -> dict[str, Any]:
    """Return the rows of `kvfix status --probe` by code. kvfix imports and probes a module whose code is unknown."""
    from kvfix_tools.status import _probed

    return {row.code: row for row in catalogue.rows(_probed)}


#: A value of EDITS has a release, (old text, new text), a claimed version, and the status before and after the import.
HARMLESS, GONE = (BUG, "            _ = 1\n" + BUG), ("def get_num_new_matched_tokens", "def matched")
EDITS = {
    "comments and blank lines": ("0.3.10", (BUG, "            # edited\n\n" + BUG), "", "applicable", "applied"),
    "a wrong version number": ("0.3.10", ("", ""), "0.5.6", "applicable", "applied"),
    "a right release that claims to be the wrong one": ("0.5.6", ("", ""), "0.3.10", *["fixed-upstream"] * 2),
    "another harmless line": ("0.3.10", HARMLESS, "", "unknown", "applied"),
    "fixed by hand": ("0.3.10", (BUG, FIXED), "", "unknown", "fixed-upstream"),
    "code that the probe does not fit": ("0.3.10", (BUG, "            return self.odd(1)\n"), "", "unknown", "refused"),
    "the function gone": ("0.3.10", GONE, "", "refused", "refused"),
    "the function gone, the version known": ("0.3.10", GONE, "0.5.6", "refused", "refused"),
}


@pytest.mark.parametrize(("name", "edit", "version", "by_file", "by_probe"), EDITS.values(), ids=EDITS)
def test_edited_copies(name, edit, version, by_file, by_probe, tmp_path, fresh, fork_server) -> None:  # type: ignore[no-untyped-def]
    folder = copy(release(name), tmp_path, lambda text: text.replace(*edit), version)
    row = fresh(f"import sys; sys.path.insert(0, {str(folder)!r}); {STATUS}")["KVF001"]
    assert row[STATE] == by_file, row
    row = fork_server(settled, folder)["KVF001"]
    assert (row[VERSION], row[STATE]) == (version or name, by_probe), row
    row = fork_server(probed, folder)["KVF001"]
    assert row[STATE] == ("applicable" if by_probe == "applied" else by_probe), row
    assert ("the behaviour probe" in row[REASON]) is (by_file == "unknown"), row
