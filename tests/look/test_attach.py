import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.look import attach, inject, ptrace
from kvfix_tools.roundtrip import real_engine
from tests.conftest import clean_environment, release
from tests.fork_server import Forked

pytestmark = pytest.mark.skipif(not ptrace.MACHINE, reason="kvfix cannot call into a process of this machine")


def test_a_fix_skips_the_requests_that_began_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag, log, lmcache = tmp_path / "flag", tmp_path / "log", release("0.3.10")
    environment = clean_environment(lmcache, KVFIX_DUMP_DIR=str(tmp_path / "dumps"))
    command = [sys.executable, str(Path(__file__).with_name("plays.py")), str(lmcache), str(flag)]

    def rows() -> dict[str, dict[str, Any]]:
        (process,) = json.loads(capsys.readouterr().out)
        return {row["code"]: row for row in process["rows"] or ()}

    with real_engine.started(command, log, environment, Forked, cwd=tmp_path) as process:
        assert real_engine.wait_for("holds", log, process, 120), log.read_text()
        pid = process.pid
        assert attach.attach(pid, "fix", None, True, 20, json=False) == 1
        assert "busy" in capsys.readouterr().out
        assert attach.attach(pid, "check", None, False, 60, json=True) == 0
        found = rows()
        assert found["KVF002"]["verdict"] == found["KVF024"]["verdict"] == "applied"
        assert found["KVF024"]["reason"].endswith("; does not change requests that began before the attach (1)")
        assert "before" not in found["KVF002"]["reason"]
        assert "KVF017" not in found  # KVF017 is opt-in, and this attach did not name KVF017
        flag.touch()
        assert real_engine.wait_for("ended", log, process, 120), log.read_text()
        assert attach.status(pid, json=True) == 0
        assert "before" not in rows()["KVF024"]["reason"]
        code = "from kvfix.session import session as s; open(ANSWER, 'w').write(f'{s.violations} {len(s.events)}')"
        violations, _, events = inject.run(pid, code, seconds=20).rpartition(" ")
        assert violations == "{}"  # mode `check` reports nothing about the request that began before the attach
        assert int(events) > 4  # events of the request `later`
        assert attach.detach(pid, 60, json=True) == 0
        assert not rows()
        assert attach.attach(pid, "fix", ["KVF002"], True, 60, json=True) == 0
        assert set(rows()) == {"KVF002"}
        assert attach.attach(pid, "fix", ["KVF002"], False, 60, json=True, plus=["KVF017"]) == 0
        assert set(rows()) == {"KVF002", "KVF017"}


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert attach.attach(os.getpid(), "strict", None, False, 1, json=False) == 2
    assert "mode strict ends the engine at a violation" in capsys.readouterr().err
    assert attach.attach(2**22 + 1, "fix", None, False, 1, json=False) == 2
    assert attach.attach(os.getpid(), "fix", ["KVF999"], False, 1, json=False) == 2
