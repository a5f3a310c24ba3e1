"""If LMCache or a part of kvfix is missing, too old or broken, kvfix prints one clear line and skips affected fixes."""

import compileall
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import packaging
import pytest

import kvfix
from kvfix import fixes
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
from tests.conftest import ADAPTER, ROOT, ForkServer, Fresh, answers, release
from tests.runtime.test_orders import status
from tests.runtime.test_releases import copy


def test_nothing_installed(fresh: Fresh) -> None:
    """With -S, Python finds only the standard library, so neither vLLM nor LMCache is installed."""
    code = "import kvfix; kvfix.apply(); result = [row.verdict for row in kvfix.status() if row.code == 'KVF001']"
    assert fresh(code, "-S") == ["not-installed"]


def test_too_old(tmp_path: Path, fresh: Fresh) -> None:
    """LMCache 0.1.4 does not have the connector's module, and kvfix does not know this release."""
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache/__init__.py").touch()
    (tmp_path / "lmcache-0.1.4.dist-info").mkdir()
    (tmp_path / "lmcache-0.1.4.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.1.4\n")
    row = fresh(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvfix; result = kvfix.status()[0]")
    assert row[3:5] == ["0.1.4", "refused"]
    assert f"the module {ADAPTER} is missing from lmcache 0.1.4" in row[5]
    assert "look for a newer release of kvfix" in row[5]


@answers("refused", release="0.3.10")
def test_target_gone_in_the_live_module() -> str:
    del import_module(ADAPTER).LMCacheConnectorV1Impl
    kvfix.apply()
    return status()


def test_unreadable_target_does_not_stop_the_others(tmp_path: Path, fresh: Fresh) -> None:
    folder = copy(release("0.3.10"), tmp_path, lambda text: "def broken(:\n" + text)
    code = "import kvfix; kvfix.apply(); print(*[row[4:] for row in kvfix.status() if row.code == 'KVF001'])"
    done = fresh.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"])
    assert done.returncode == 0
    assert done.stdout.startswith("('refused', ")
    assert all(part in done.stdout for part in ("cannot be read as Python", "reinstall lmcache"))
    assert "Traceback" not in done.stderr


def test_a_fix_that_cannot_be_loaded_is_skipped_with_a_warning(tmp_path: Path, fresh: Fresh) -> None:
    folder = package(tmp_path) / "fixes/lmcache"
    (folder / "kvf999_broken.py").write_text("raise RuntimeError('planted')")
    (folder / "kvf998_without_record.py").write_text("")
    code = "import kvfix; kvfix.apply(); print(kvfix.status(), kvfix.status())"
    done = fresh.run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path))
    assert (done.returncode, "KVF001" in done.stdout, "KVF999" in done.stdout) == (0, True, False)
    assert done.stderr.count("planted") == 1
    assert done.stderr.count("loading kvfix.fixes.lmcache.kvf998_without_record: AttributeError") == 1


@pytest.mark.parametrize(
    ("place", "name", "answer"),
    [
        ("applying", "settle", True),
        ("applying", "_wrapped", True),
        ("applicability", "judge_live", True),
        ("applicability", "fingerprints", True),
        ("installed_source", "file_hash", True),
        ("applicability", "decide", True),
        ("catalogue", "fixes_of", True),
        ("installed_source", "version", False),  # kvfix needs `version` only for a log line
    ],
)
@answers(also="answer", release="0.3.10")
def test_an_error_in_kvfix_leaves_the_engine_unpatched_and_running(place: str, name: str) -> bool:
    """Let the function `name` of kvfix raise. Return True if LMCache's hook still has the bug of KVF001."""
    setattr(import_module(f"kvfix.{place}"), name, mock.Mock(side_effect=RuntimeError("planted")))
    kvfix.apply()
    adapter = import_module(ADAPTER)
    return shows_bug(vars(adapter.LMCacheConnectorV1Impl)["get_num_new_matched_tokens"], adapter)


def without_stderr() -> str:
    os.close(2)
    sys.stderr = None  # type: ignore[assignment]
    kvfix.apply()
    import_module(ADAPTER)
    return status()


def test_a_closed_stderr_stops_nothing(fork_server: ForkServer) -> None:
    """This test does not use the lab, because the lab turns logging off."""
    assert fork_server(without_stderr, release("0.3.10")) == "applied"


#: This program reads two files of kvfix. `only=` needs the catalogue, and status() needs the fingerprints.
INSTALLED = """
import sys; sys.path.insert(0, {lmcache!r})
import kvfix, kvfix.fixes
kvfix.apply(only=["KVF001"])
rows = {{row.code: row.verdict for row in kvfix.status()}}
result = [kvfix.__file__, len(kvfix.fixes.modules()), rows.get("KVF001")]
"""


def package(folder: Path) -> Path:
    return shutil.copytree(ROOT / "patches/kvfix", folder / "kvfix", ignore=shutil.ignore_patterns("__pycache__"))


def compiled_only(folder: Path) -> Path:
    made = package(folder)
    assert compileall.compile_dir(str(made), quiet=1, legacy=True)
    for source in made.rglob("*.py"):
        source.unlink()
    return folder


def zipped(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder / "kvfix"), "zip", package(folder / "unpacked").parent))


@pytest.mark.parametrize("install", [compiled_only, zipped])
def test_no_fix_is_lost(install: Any, tmp_path: Path, fresh: Fresh) -> None:
    place = install(tmp_path)
    found, count, status = fresh(INSTALLED.format(lmcache=str(release("0.3.10"))), PYTHONPATH=str(place))
    assert found.startswith(str(place))
    assert (count, status) == (len(fixes.modules()), "applicable")


def test_an_installation_without_fixes_is_an_error(tmp_path: Path, fresh: Fresh) -> None:
    for fix in package(tmp_path).glob("fixes/*/kvf*.py"):
        fix.unlink()
    path = f"{tmp_path}:{ROOT / 'tools'}"
    code = "import kvfix; kvfix.apply(); kvfix.apply(); print(kvfix.status(), kvfix.status())"
    applied = fresh.run([sys.executable, "-c", code], PYTHONPATH=path)
    assert applied.stdout == "[] []\n"
    assert applied.stderr.count("this installation of kvfix is broken and fixes nothing") == 1
    status = fresh.run([sys.executable, "-m", "kvfix_tools.cli", "status"], PYTHONPATH=path)
    assert status.returncode == 2
    assert "kvfix status: this installation of kvfix has no fixes" in status.stderr


#: `package_dir` in setup.py names the package, so setuptools writes an import finder. A .pth file starts the finder.
EDITABLE = """
import site, sys
site.addsitedir({site!r})
import kvfix
rows = {{row.code: [row.verdict, row.version] for row in kvfix.status()}}
result = [rows["KVF001"], "lmcache" in sys.modules]
"""


def test_an_editable_lmcache_is_installed(tmp_path: Path, fresh: Fresh) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    (project / "wheel").mkdir(parents=True)
    (project / "src").symlink_to(release("0.3.10"))
    (project / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='lmcache', version='0.3.10', packages=['lmcache'], package_dir={'lmcache': 'src/lmcache'})\n"
    )
    build = "from setuptools.build_meta import build_editable; build_editable('wheel')"
    done = fresh.run([sys.executable, "-c", f"import os; os.chdir({str(project)!r}); {build}"])
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "wheel").glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    assert not (site / "lmcache").exists()
    (site / "packaging").symlink_to(packaging.__path__[0])  # -S hides site-packages, which has another LMCache
    assert fresh(EDITABLE.format(site=str(site)), "-S") == [["applicable", "0.3.10"], False]
