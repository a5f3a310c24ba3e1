"""Missing, old, odd or broken input: one clear line (what, where, what to do), no traceback, no fix applied."""

import sys
from pathlib import Path

from tests.conftest import ADAPTER, ROOT, ForkServer, Fresh
from tests.runtime.test_releases import copy

STATUS = "import kvfix; kvfix.apply(); result = [row.verdict for row in kvfix.status() if row.code == 'KVF001']"


def test_nothing_installed(fresh: Fresh) -> None:
    """Neither vLLM nor LMCache nor anything else: with -S there is only the standard library."""
    assert fresh(STATUS, "-S") == ["not-installed"]


def test_too_old(tmp_path: Path, fresh: Fresh) -> None:
    """A release from before the connector: without the module, and of a version that kvfix does not know."""
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache/__init__.py").touch()
    (tmp_path / "lmcache-0.1.4.dist-info").mkdir()
    (tmp_path / "lmcache-0.1.4.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.1.4\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvfix; result = kvfix.status()[0]"
    row = fresh(code)
    assert row[3:5] == ["0.1.4", "unknown"]
    assert f"the module {ADAPTER} has gone from lmcache 0.1.4" in row[5]
    assert "look for a kvfix release" in row[5]


def test_target_gone_in_the_live_module(fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    code = f"""
import {ADAPTER} as adapter
del adapter.LMCacheConnectorV1Impl
{STATUS}
"""
    assert fork_server(code, release("0.3.10")) == ["unknown"]


def test_unreadable_target_does_not_stop_the_others(tmp_path: Path, release, fresh: Fresh) -> None:  # type: ignore[no-untyped-def]
    folder = copy(release("0.3.10"), tmp_path, lambda text: "def broken(:\n" + text)
    done = fresh.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {STATUS}; print(result)"]
    )
    assert (done.stdout.strip(), done.returncode) == ("['unknown']", 0)
    assert "Traceback" not in done.stderr


def test_a_fix_that_cannot_be_loaded_is_skipped_with_a_warning(tmp_path: Path, fresh: Fresh) -> None:
    import shutil

    shutil.copytree(ROOT / "patches/kvfix", tmp_path / "kvfix")
    (tmp_path / "kvfix/fixes/lmcache/kvf999_broken.py").write_text("raise RuntimeError('planted')")
    (tmp_path / "kvfix/fixes/lmcache/kvf998_without_record.py").write_text("")
    code = (
        "import kvfix; kvfix.apply(); print([row.code for row in kvfix.status()], [row.code for row in kvfix.status()])"
    )
    done = fresh.run([sys.executable, "-c", code], PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert "KVF001" in done.stdout
    assert "KVF999" not in done.stdout
    assert done.stderr.count("planted") == 1
    assert done.stderr.count("loading kvfix.fixes.lmcache.kvf998_without_record: AttributeError") == 1


PLANTED = f"""
import kvfix, kvfix.{{place}} as place
def raises(*args, **kwargs):
    raise RuntimeError("planted")
place.{{name}} = raises
kvfix.apply()
import {ADAPTER} as adapter
hook = vars(adapter.LMCacheConnectorV1Impl)["get_num_new_matched_tokens"]
adapter.logger.disabled = True
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
result = shows_bug(hook, adapter)
kvfix.revert()
"""


def test_an_error_in_kvfix_leaves_the_engine_unpatched_and_running(fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    for place, name, unpatched in (
        ("applying", "settle", True),
        ("applying", "_wrapped", True),
        ("applicability", "judge_live", True),
        ("applicability", "fingerprints", True),
        ("installed_source", "fingerprint", True),
        ("catalogue", "fixes", True),
        ("installed_source", "version", False),  # only for the log line
    ):
        case = PLANTED.format(place=place, name=name)
        assert fork_server(case, release("0.3.10")) is unpatched, (place, name)


def test_a_closed_stderr_stops_nothing(fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    code = f"""
import os, sys, kvfix
os.close(2)
sys.stderr = None
kvfix.apply()
import {ADAPTER}
result = [row.verdict for row in kvfix.status() if row.code == "KVF001"]
"""
    assert fork_server(code, release("0.3.10")) == ["applied"]
