"""Stage `engines`: real vLLM engines with LMCache, as released, with kvfix's fixes and in mode `check`.

Each engine answers the rounds of `kvfix roundtrip --backend engine` in its own processes. With enough cores the engines
run at the same time. An engine without connector gives the right answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from maintain.gpu import steps

#: Cores that one engine needs, with its server.
CORES = 2


class Case(NamedTuple):
    """An engine. connector: for the backend `engine`, or "". mode: value of KVFIX."""

    what: str
    connector: str
    mode: str


PLAIN = Case("without connector", "", "off")
#: LMCache issue 4463: all tokens are promised and loaded, but the answers differ.
RELEASED = Case("in process, as released", "v1", "off")
CASES = (
    PLAIN,
    RELEASED,
    Case("in process, fixes", "v1", "fix"),
    Case("in process, check", "v1", "check"),
    Case("multi-process, fixes", "mp", "fix"),
    Case("multi-process, check", "mp", "check"),
)


def ask(case: Case, device: str) -> dict[str, Any]:
    """Run one engine in a separate process, because KVFIX is a variable of the process."""
    command = [sys.executable, "-m", __spec__.name, json.dumps(case), "--device", device]
    dumps = tempfile.mkdtemp(prefix="kvfix-gpu-")
    environment = {**os.environ, "KVFIX": case.mode, "KVFIX_DUMP_DIR": dumps}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"answer": None, "log": f"{done.stdout}\n{done.stderr}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def ask_here(case: Case, device: str) -> dict[str, Any]:
    from kvfix_tools.roundtrip.backends import engine

    with tempfile.TemporaryDirectory() as folder, _transfer(case, Path(folder)) as transfer:
        ended = engine.start_engine(Path(folder), transfer, device)
    return {"answer": ended.answer, "log": ended.log}


@contextlib.contextmanager
def _transfer(case: Case, folder: Path) -> Iterator[dict[str, Any] | None]:
    from kvfix_tools.roundtrip.backends import engine

    if not case.connector:
        yield None
        return
    with engine.connector(case.connector, folder) as transfer:
        yield transfer


def judge(done: steps.Steps, case: Case, plain: dict[str, Any] | None, ran: dict[str, Any]) -> None:
    from kvfix_tools.roundtrip.backends import engine

    answer, log = ran["answer"], ran["log"]
    if answer is None or plain is None:
        why = engine.cause(log) if answer is None else "no answers to compare with"
        done.add(case.what, False, why, log=log[-5000:])
        return
    wrong = engine.judge(plain, answer) if case != PLAIN else None
    violations = re.findall(r"^.*SUMMARY: kvfix .*$", log, re.MULTILINE)
    fixes = sorted(set(re.findall(r"\b(KVF\d+) \S+ applied to", log)))
    warm = answer["warm"]
    figures = f"{wrong or 'answers are right'}; {warm['hits']} tokens promised, {warm['loads']['loaded']} loaded"
    figures += f"; {len(fixes)} fixes" if fixes else ""
    figures += f"; {len(violations)} violations" if case.mode == "check" else ""
    loaded = warm["hits"] > 0 and warm["loads"]["loaded"] > 0
    differs = bool(wrong) and "outputs differ" in str(wrong)
    right = differs and loaded if case == RELEASED else not wrong and not violations
    done.add(case.what, right, figures, fixes=fixes, violations=violations[:10], log="" if right else log[-5000:])


def main(arguments: list[str]) -> int:
    name, device = steps.device(arguments)
    if name:
        print(json.dumps(ask_here(Case(*json.loads(name)), device)))
        return 0
    done = steps.Steps()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES)) as pool:
        running = {case: pool.submit(ask, case, device) for case in CASES}
        plain = running[PLAIN].result()["answer"]
        for case, future in running.items():
            judge(done, case, plain, future.result())
    return done.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
