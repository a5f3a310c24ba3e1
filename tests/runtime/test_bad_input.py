"""Missing, old, odd or broken input: one clear line (what, where, what to do), no traceback, no fix applied."""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kvfix
from kvfix.fixes.lmcache.kvf001_lookup_cache_ignores_computed import shows_bug
from tests.conftest import ADAPTER, ROOT, ForkServer, Fresh, release
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
    assert row[3:5] == ["0.1.4", "refused"]
    assert f"the module {ADAPTER} has gone from lmcache 0.1.4" in row[5]
    assert "look for a newer release of kvfix" in row[5]


def status() -> str:
    kvfix.apply()
    return next(row.verdict for row in kvfix.status() if row.code == "KVF001")


def without_target() -> str:
    del import_module(ADAPTER).LMCacheConnectorV1Impl
    return status()


def test_target_gone_in_the_live_module(fork_server: ForkServer) -> None:
    assert fork_server(without_target, release("0.3.10")) == "refused"


def test_unreadable_target_does_not_stop_the_others(tmp_path: Path, fresh: Fresh) -> None:
    folder = copy(release("0.3.10"), tmp_path, lambda text: "def broken(:\n" + text)
    code = "import kvfix; kvfix.apply(); print(*[row[4:] for row in kvfix.status() if row.code == 'KVF001'])"
    done = fresh.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"])
    assert done.returncode == 0
    assert done.stdout.startswith("('refused', ")
    assert all(part in done.stdout for part in ("cannot be read as Python", "reinstall lmcache"))
    assert "Traceback" not in done.stderr


def test_a_fix_that_cannot_be_loaded_is_skipped_with_a_warning(tmp_path: Path, fresh: Fresh) -> None:
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


def with_error_in(place: str, name: str) -> bool:
    """Return True if the hook still has the bug when this function of kvfix raises."""

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    setattr(import_module(f"kvfix.{place}"), name, raises)
    kvfix.apply()
    adapter = import_module(ADAPTER)
    adapter.logger.disabled = True
    return shows_bug(vars(adapter.LMCacheConnectorV1Impl)["get_num_new_matched_tokens"], adapter)


def test_an_error_in_kvfix_leaves_the_engine_unpatched_and_running(fork_server: ForkServer) -> None:
    for place, name, unpatched in (
        ("applying", "settle", True),
        ("applying", "_wrapped", True),
        ("applicability", "judge_live", True),
        ("applicability", "fingerprints", True),
        ("installed_source", "file_hash", True),
        ("transaction", "decide", True),
        ("catalogue", "fixes_of", True),
        ("installed_source", "version", False),  # only for the log line
    ):
        assert fork_server(with_error_in, release("0.3.10"), place, name) is unpatched, (place, name)


def without_stderr() -> str:
    os.close(2)
    sys.stderr = None  # type: ignore[assignment]
    kvfix.apply()
    import_module(ADAPTER)
    return status()


def test_a_closed_stderr_stops_nothing(fork_server: ForkServer) -> None:
    assert fork_server(without_stderr, release("0.3.10")) == "applied"
