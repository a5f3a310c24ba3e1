"""Make logs for the tests of kvfix-diagnose. Each line is the text of a release's log statement, filled with values."""

import gzip
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import tomllib

from kvfix import installed_source
from kvfix_tools.diagnose import log_files, statements
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from kvfix_tools.diagnose.line_scanner import Scanner
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.statements import Statement
from tests.conftest import ROOT

NEWEST = "0.5.6"
LOGS = Path(__file__).parent / "logs"  # logs of real engines (test_real_logs.py)
LMCACHE = "[2026-11-21 01:41:27,007] LMCache {level}: {text} (any.py:7:lmcache.any)\n"
VLLM = "(EngineCore_DP0 pid=276) {level} 12-03 01:24:36 [any.py:7] {text}\n"
CORE = "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [core.py:7] "  # the prefix of each line of a traceback
FATAL = f"{CORE}EngineCore encountered a fatal error.\n"
STARTS = "(EngineCore_DP0 pid=276) INFO 12-03 01:24:36 [core.py:7] Initializing a V1 LLM engine (v{}) with config: x\n"


def finding_logs(kind: str) -> dict[str, list[str]]:
    """Return {problem code: logs of this kind}. finding_logs.toml explains the kinds (`found`, `alike`, `says`)."""
    known = tomllib.loads(Path(__file__).with_name("finding_logs.toml").read_text())
    return {code: [expanded(log) for log in logs.get(kind, ())] for code, logs in known.items()}


def expanded(log: str) -> str:
    """Replace lines with the prefix `3 x ` by three copies of the lines without the prefix. {n}: number of the copy."""

    def repeat(lines: re.Match[str]) -> str:
        block = re.sub(r"^\d+ x ", "", lines[0], flags=re.MULTILINE)
        return "".join(block.replace("{n}", str(number)) for number in range(int(lines[1])))

    return re.sub(r"^(\d+) x .*\n(?:\1 x .*\n)*", repeat, log, flags=re.MULTILINE)


def real(name: str) -> bytes:
    return gzip.decompress((LOGS / f"{name}.log.gz").read_bytes())


def filled(template: str, given: tuple[Any, ...] = ()) -> tuple[str, list[str]]:
    """Fill the first placeholders with `given`, the others with distinct numbers. Return the text and all values."""
    used: list[str] = []
    values: Iterator[Any] = iter((*given, *(number for number, _ in zip(count(12), template, strict=False))))

    def take(place: re.Match[str]) -> str:
        if place[0] == "%%":
            return "%"
        value = next(values)
        used.append(str(value))
        return str(value) if place[0] == "{}" else place[0] % value

    return statements._PLACE.sub(take, template), used


def printed(release: str, row: Statement, *values: Any) -> str:
    at = f"{row.file}:{row.lines[release][0]}:lmcache.{row.file.removesuffix('.py')}"
    text, _ = filled(row.template, values)
    return f"\x1b[32;20m[2026-11-21 01:41:27,007] LMCache {row.level.upper()}:\x1b[0m {text} \x1b[3m({at})\x1b[0m\n"


def logged(release: str, message: str, *values: Any, which: str = "") -> str:
    """Return the line that this release logs for this message. which: a text that the log statement must contain."""
    for row in statements.known()["lmcache"]:
        if row.message == message and release in row.lines and which in f"'{row.template}'":
            return printed(release, row, *values)
    raise AssertionError(f"{release} does not log {message}")


def version(release: str) -> str:
    """Return the line that names the release. LMCache 0.3.9 and later log this line."""
    return logged(release, "version", "KVConnectorRole.SCHEDULER", release, "0.11.2", "{}")


def diagnose(*lines: str) -> Diagnosis:
    return diagnosed("".join(lines).encode())


def diagnose_files(*paths: Path) -> Diagnosis:
    log = Diagnosis()
    assert log_files.read(log, log_files.sources([str(path) for path in paths])) == []
    log.end()
    return log


def codes(log: Diagnosis) -> list[str]:
    return [found.rule.code for found in log.findings]


def asked(release: str, total: int, computed: int, hit: int, need: int, request: str = "cmpl-1") -> str:
    if release.startswith(("0.3.9", "0.3.10", "0.3.11", "0.3.12", "0.3.13")):
        return logged(release, "asked", request, total, hit, need, which="%d, need to load")
    return logged(release, "asked", request, total, computed, hit, need, which="%d, need to load")


def site_packages() -> Path:
    return Path(str(installed_source.package_dir("vllm"))).parent


def vllm_releases() -> dict[str, Path]:
    """Return {release: site-packages folder} of the installed vLLM and of each vLLM in .cache/vllm."""
    others = (ROOT / ".cache/vllm").glob("*/lib/python*/site-packages")
    return {"0.32.0": site_packages(), **{path.parts[-4]: path for path in others}}


def raised(frames: list[tuple[str, str, str]], error: str) -> str:
    """Return a traceback in the format of EngineCore's log. frames: (file, function, line of code) of each frame."""
    lines = ["Traceback (most recent call last):"]
    for file, function, source in frames:
        lines += [f'  File "/opt/app/{file}", line 7, in {function}', f"    {source}"]
    return "".join(f"{CORE}{line}\n" for line in [*lines, error])


def scanned(log: str | bytes) -> list[LogLine]:
    scanner = Scanner("log")
    return [*scanner.scan(log.encode() if isinstance(log, str) else log), *scanner.end()]
