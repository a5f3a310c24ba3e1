"""kvfix installed as bytecode only, or in a zip; an editable LMCache with its own finder."""

import compileall
import io
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import packaging
import pytest

from kvfix import fixes
from tests.conftest import ROOT, Fresh, release

#: A configuration with a fix by name, the catalogue, and a status that needs the fingerprints.
STATUS = """
import sys; sys.path.insert(0, {lmcache!r})
import kvfix, kvfix.fixes
kvfix.apply(only=["KVF001"])
rows = {{row.code: row.verdict for row in kvfix.status()}}
result = [kvfix.__file__, len(kvfix.fixes.modules()), rows.get("KVF001")]
"""


def package(folder: Path) -> Path:
    """A copy of the package, without bytecode."""
    return shutil.copytree(ROOT / "patches/kvfix", folder / "kvfix", ignore=shutil.ignore_patterns("__pycache__"))


def compiled_only(folder: Path) -> Path:
    made = package(folder)
    assert compileall.compile_dir(str(made), quiet=1, legacy=True)
    for source in made.rglob("*.py"):
        source.unlink()
    return folder


def zipped(folder: Path) -> Path:
    made, archive = package(folder / "unpacked"), folder / "kvfix.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in made.rglob("*"):
            file.write(path, path.relative_to(made.parent))
    return archive


@pytest.mark.parametrize("install", [compiled_only, zipped])
def test_no_fix_is_lost(install: Any, tmp_path: Path, fresh: Fresh) -> None:
    place = install(tmp_path)
    found, count, status = fresh(STATUS.format(lmcache=str(release("0.3.10"))), PYTHONPATH=str(place))
    assert found.startswith(str(place))
    assert (count, status) == (len(fixes.modules()), "applicable")


def test_an_installation_without_fixes_is_an_error(tmp_path: Path, fresh: Fresh) -> None:
    for fix in package(tmp_path).glob("fixes/*/kvf*.py"):
        fix.unlink()
    path = f"{tmp_path}:{ROOT / 'tools'}"
    applied = fresh.run(
        [sys.executable, "-c", "import kvfix; kvfix.apply(); kvfix.apply(); print(kvfix.status(), kvfix.status())"],
        PYTHONPATH=path,
    )
    assert applied.stdout == "[] []\n"
    assert applied.stderr.count("this installation of kvfix is broken and fixes nothing") == 1
    status = fresh.run([sys.executable, "-m", "kvfix_tools.cli", "status"], PYTHONPATH=path)
    assert status.returncode == 2
    assert "kvfix status: this installation of kvfix has no fixes" in status.stderr


#: setuptools writes a finder for a package in a folder of another layout; site runs its .pth file at start.
EDITABLE = """
import site, sys
site.addsitedir({site!r})
import kvfix
rows = {{row.code: [row.verdict, row.version] for row in kvfix.status()}}
result = [rows["KVF001"], "lmcache" in sys.modules]
"""


def test_an_editable_lmcache_is_installed(tmp_path: Path, fresh: Fresh) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "src").symlink_to(release("0.3.10"))
    (project / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='lmcache', version='0.3.10', packages=['lmcache'], package_dir={'lmcache': 'src/lmcache'})\n"
    )
    build = "from setuptools.build_meta import build_editable; build_editable('wheel')"
    (project / "wheel").mkdir()
    done = fresh.run([sys.executable, "-c", f"import os; os.chdir({str(project)!r}); {build}"])
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "wheel").glob("*.whl")
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        archive.extractall(site)
    assert not (site / "lmcache").exists()
    (site / "packaging").symlink_to(packaging.__path__[0])  # -S: site-packages has another LMCache
    assert fresh(EDITABLE.format(site=str(site)), "-S") == [["applicable", "0.3.10"], False]
