"""Lines of logs for the tests of findings, each a release's own statement with values of ours."""

import ast
import gzip
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from kvfix_tools.diagnose import log_files, statements
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from kvfix_tools.diagnose.line_scanner import Scanner
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.statements import Statement
from maintain import statements as released
from tests.conftest import RELEASES

NEWEST = "0.5.6"
#: Logs of real engines (README.md there).
LOGS = Path(__file__).parent / "logs"
#: A line of each logger.
LMCACHE = "[2026-11-21 01:41:27,007] LMCache {level}: {text} (any.py:7:lmcache.any)\n"
VLLM = "(EngineCore_DP0 pid=276) {level} 12-03 01:24:36 [any.py:7] {text}\n"
#: In front of each line of a traceback that EngineCore logs.
CORE = "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [core.py:7] "
FATAL = f"{CORE}EngineCore encountered a fatal error.\n"


def real(name: str) -> bytes:
    """Return the log of this name in LOGS."""
    return gzip.decompress((LOGS / f"{name}.log.gz").read_bytes())


def rows(release: str, message: str, which: str = "") -> list[Statement]:
    """Return LMCache's statements of this message in this release. which: part of the template."""
    found = [row for row in statements.known()["lmcache"] if row.message == message and release in row.lines]
    found = [row for row in found if which in f"'{row.template}'"]
    assert found, f"{release} does not log {message}"
    return found


def filled(template: str, given: tuple[Any, ...] = ()) -> tuple[str, list[str]]:
    """Return the template with these values, then with numbers, each only once; and the values."""
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
    """Return the line of this statement, in the format of LMCache's logger."""
    at = f"{row.file}:{row.lines[release][0]}:lmcache.{row.file.removesuffix('.py')}"
    text, _ = filled(row.template, values)
    return f"\x1b[32;20m[2026-11-21 01:41:27,007] LMCache {row.level.upper()}:\x1b[0m {text} \x1b[3m({at})\x1b[0m\n"


def logged(release: str, message: str, *values: Any, which: str = "") -> str:
    return printed(release, rows(release, message, which)[0], *values)


def crash(release: str, message: str, *values: Any, which: str = "") -> str:
    """The traceback of this assertion or exception, in its file and function, as EngineCore logs it."""
    return fail(release, rows(release, message, which)[0], *values)


def fail(release: str, row: Statement, *values: Any) -> str:
    for path in files(release)[row.file]:
        for message, text, level, number in extract(path.read_bytes()):
            if (message, text, level) == row[:3]:
                source = path.read_text().splitlines()[number - 1]
                raises = re.search(r"raise ([\w.]+)", source)
                kind = "AssertionError" if level == "assert" else raises[1] if raises else "ConnectionError"
                return died_at(path, number, f"{kind}: {filled(text, values)[0]}")
    raise AssertionError(f"{release} does not have {row}")


def bare(release: str, file: str, function: str, source: str, root: Path | None = None) -> str:
    """The traceback of an assertion without a text: `source` is what it asserts, in this function."""
    for path in files(release)[file] if root is None else [root / file]:
        for node, within, _ in released.with_place(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Assert) and within == function and ast.unparse(node) == source:
                return died_at(path, node.lineno, "AssertionError")
    raise AssertionError(f"{release} has no `{source}` in {function} of {file}")


def died_at(path: Path, number: int, error: str) -> str:
    source = path.read_text()
    places = released.with_place(ast.parse(source))
    function = next(within for node, within, _ in places if isinstance(node, ast.stmt) and node.lineno == number)
    name = path.relative_to(next(each for each in path.parents if each.name in ("lmcache", "vllm")).parent)
    return FATAL + raised([(str(name), function, source.splitlines()[number - 1].strip())], error)


@lru_cache(maxsize=512)
def extract(source: bytes) -> list[tuple[str, str, str, int]]:
    return released.statements_in(source)


@lru_cache(maxsize=64)
def files(release: str) -> dict[str, list[Path]]:
    """{name: the files of this name in the release}"""
    found: dict[str, list[Path]] = {}
    for path in (RELEASES / release / "lmcache").rglob("*.py"):
        found.setdefault(path.name, []).append(path)
    return found


def version(release: str) -> str:
    """The line that names the release, where it has it (0.3.9 and later)."""
    return logged(release, "version", "KVConnectorRole.SCHEDULER", release, "0.11.2", "{}")


def stats(
    running: int = 0,
    waiting: int = 0,
    generation: float = 0.0,
    second: int = 0,
    prompt: float = 0.0,
    external: float | None = None,
) -> str:
    """The installed vLLM's statistics, of the parts that it joins, with the prefix that it puts before them."""
    heads = ("%s KV", "Prefix") if external is None else ("%s KV", "Prefix", "External")
    parts = statistics_parts()[:4] + [part for part in statistics_parts() if part.startswith(heads)]
    values = (prompt, generation, running, waiting, "GPU", 93.1, 12.0, *(() if external is None else (external,)))
    text = ", ".join(parts) % values
    return f"(APIServer pid=7) INFO 12-03 01:24:{second % 60:02d} [loggers.py:248] Engine 000: {text}\n"


@lru_cache(maxsize=1)
def statistics_parts() -> list[str]:
    """Texts with values in `LoggingStatLogger.log` (v1/metrics/loggers.py 0.32.0:283), in the source's order."""
    tree = ast.parse((site_packages() / "vllm/v1/metrics/loggers.py").read_bytes())
    (logger,) = (node for node in tree.body if getattr(node, "name", "") == "LoggingStatLogger")
    places = released.with_place(logger)
    values = [node.value for node, within, _ in places if within == "log" and isinstance(node, ast.Constant)]
    return [value for value in values if "%" in str(value)]


def vllm(message: str, *values: Any, release: str = "0.32.0", which: str = "") -> str:
    """A line of vLLM: its release's own statement, as statements.json has it, with these values."""
    for row in statements.known()["vllm"]:
        if row.message == message and release in row.lines and which in row.template:
            return framed(row.template, *values, at=f"{row.file}:{row.lines[release][0]}")
    raise AssertionError(f"vLLM {release} does not log {message}")


def vllm_unread(words: str, *values: Any) -> str:
    """A line of the installed vLLM's scheduler that the grammar does not read."""
    template, _, number = unread_statement(site_packages() / SCHEDULER, words)
    return framed(template, *values, at=f"{Path(SCHEDULER).name}:{number}")


def framed(template: str, *values: Any, at: str) -> str:
    text, _ = filled(template, values)
    return f"(EngineCore_DP0 pid=276) WARNING 12-03 01:24:36 [{at}] {text}\n"


def unread(release: str, file: str, words: str, *values: Any) -> str:
    """A line of this LMCache release that the grammar does not read. file: below `lmcache/`."""
    path = RELEASES / release / "lmcache" / file
    template, level, number = unread_statement(path, words)
    if level in ("assert", "raise"):
        return died_at(path, number, f"AssertionError: {filled(template, values)[0]}")
    return printed(release, Statement("", template, level, Path(file).name, {release: (number,)}), *values)


def unread_statement(path: Path, words: str) -> tuple[str, str, int]:
    """Return (template, level, line) of the statement with these words."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        level, text = released.said(node)
        template = released.template(text) or ""
        if isinstance(node, ast.stmt | ast.expr) and level not in ("", "text") and words in template:
            return template, "error" if level == "exception" else level, node.lineno
    raise AssertionError(f"{path} does not say {words!r}")


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


def below(release: str, request: str, computed: int, hit: int) -> str:
    return logged(release, "asked", request, 1500, computed, hit, hit - computed, 512, which="min_retrieve")


V1 = "vllm_v1_adapter.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"


def site_packages() -> Path:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent.parent


def transfer_asserts(source: str) -> str:
    """The traceback of this assertion of vLLM's scheduler about a transfer that has ended."""
    return bare("", SCHEDULER, "_update_from_kv_xfer_finished", source, root=site_packages())


def handler_failed(head: str = "Error in blocking handler", error: str = "broken", function: str = "store") -> str:
    """A handler of the LMCache server raises, as its log has it."""
    return (
        f"[2026-11-21 11:26:49,358] LMCache ERROR: {head} (mq.py:738:lmcache.v1.multiprocess.transport.zmq_impl.mq)\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/lmcache/v1/multiprocess/transport/zmq_impl/mq.py", line 725, in _notify_response\n'
        "    response = fut.result()\n"
        f'  File "/opt/lmcache/v1/multiprocess/modules/any.py", line 7, in {function}\n'
        f"    raise ValueError({error!r})\n"
        f"ValueError: {error}\n"
    )


def raised(frames: list[tuple[str, str, str]], error: str) -> str:
    """A traceback that EngineCore logs. frames: file, function and line of code."""
    lines = ["Traceback (most recent call last):"]
    for file, function, source in frames:
        lines += [f'  File "/opt/app/{file}", line 7, in {function}', f"    {source}"]
    return "".join(f"{CORE}{line}\n" for line in [*lines, error])


def scanned(log: str | bytes) -> list[LogLine]:
    """Every line that means something of a log in memory."""
    scanner = Scanner("log")
    return [*scanner.scan(log.encode() if isinstance(log, str) else log), *scanner.end()]
