"""`kvfix attach` and `detach` on the real scheduler and connector, which play on meanwhile.

tests/engine does the same on an engine.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfix_tools.look import attach, inject, ptrace
from kvfix_tools.roundtrip import real_engine
from tests.conftest import ROOT, clean_environment, release
from tests.fork_server import Forked

PROGRAM = Path(__file__).with_name("plays.py")
#: Names of the functions that do not have their original again.
WRAPPED = "[f.name for f in its.wrapped.values() if inspect.getattr_static(f.owner, f.name) is not f.original]"

pytestmark = pytest.mark.skipif(not ptrace.MACHINE, reason="kvfix cannot call into a process of this machine")


class Playing:
    def __init__(self, process: Forked, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    def lines(self) -> list[str]:
        return self._log.read_text().split()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until these are the last lines.

        The lines of schedules that played during attach or detach are before them.
        """
        until = time.monotonic() + 120
        while self.lines()[-count:] != [text] * count:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < until, self.lines()[-10:]
            time.sleep(0.05)

    def asked(self, expression: str) -> Any:
        code = "import inspect, json; from kvfix.session import session as its\n"
        code += f"open(ANSWER, 'w').write(json.dumps({expression}))"
        return json.loads(inject.run(self.pid, code, seconds=20))


@contextmanager
def playing(folder: Path, lmcache: Path, slug: str, *flag: Path) -> Iterator[Playing]:
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join(map(str, (lmcache, ROOT / "patches", ROOT / "tools"))),
        KVFIX_DUMP_DIR=str(folder / "dumps"),
    )
    command = [sys.executable, str(PROGRAM), str(lmcache), slug, *map(str, flag)]
    with real_engine.started(command, folder / "log", environment, Forked, cwd=folder) as process:
        yield Playing(process, folder / "log")


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    (process,) = json.loads(capsys.readouterr().out)
    return {row["code"]: row for row in process["rows"] or ()}


def test_in_and_out_while_it_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KVF005: as released every schedule leaks a hit. Mode `check` reports no violation of requests before attach."""
    with playing(tmp_path, release("0.5.6"), "abort-while-waiting") as engine:
        engine.wait_for("violated", 2)
        for mode in ("fix", "check") * 3:
            assert attach.attach(engine.pid, mode, None, False, 60, json=True) == 0
            assert rows(capsys)["KVF005"]["verdict"] == "applied"
            engine.wait_for("clean", 5)
            if mode == "check":
                violations, events = engine.asked("[its.violations, len(its.events)]")
                assert not violations
                assert events > 10
            assert attach.status(engine.pid, json=True) == 0
            assert rows(capsys)["KVF005"]["verdict"] == "applied"
            assert attach.detach(engine.pid, 60, json=True) == 0
            engine.wait_for("violated", 2)
            assert not rows(capsys)
            assert engine.asked(f"[len(its.wrapped) > 5, {WRAPPED}]") == [True, []]
        assert attach.attach(engine.pid, "fix", ["KVF002"], False, 60, json=True) == 0
        assert set(rows(capsys)) == {"KVF002"}
        assert attach.attach(engine.pid, "fix", ["KVF002"], False, 60, json=True, plus=["KVF017"]) == 0
        assert set(rows(capsys)) == {"KVF002", "KVF017"}
        engine.wait_for("violated", 2)


def test_a_fix_that_takes_notes_leaves_the_requests_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "flag"
    with playing(tmp_path, release("0.3.10"), "abort-while-waiting", flag) as engine:
        engine.wait_for("holds")
        assert attach.attach(engine.pid, "fix", None, True, 20, json=False) == 1
        assert "busy" in capsys.readouterr().out
        assert attach.attach(engine.pid, "fix", None, False, 60, json=True) == 0
        found = rows(capsys)
        assert found["KVF002"]["verdict"] == found["KVF024"]["verdict"] == "applied"
        assert found["KVF024"]["reason"].endswith("; does not change 1 requests that began before")
        assert "before" not in found["KVF002"]["reason"]
        assert "KVF017" not in found  # it was not asked for
        flag.touch()
        engine.wait_for("ended")
        assert attach.status(engine.pid, json=True) == 0
        assert "before" not in rows(capsys)["KVF024"]["reason"]
        assert attach.detach(engine.pid, 60, json=True) == 0
        assert attach.attach(engine.pid, "fix", None, True, 60, json=False) == 0


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert attach.attach(os.getpid(), "strict", None, False, 1, json=False) == 2
    assert "mode strict ends the engine at a violation" in capsys.readouterr().err
    assert attach.attach(2**22 + 1, "fix", None, False, 1, json=False) == 2
    assert attach.attach(os.getpid(), "fix", ["KVF999"], False, 1, json=False) == 2
