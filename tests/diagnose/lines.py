"""Lines of logs for the tests of findings, each a release's own statement with values of ours."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvfix_tools.diagnose import statements
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from kvfix_tools.diagnose.line_scanner import Scanner
from kvfix_tools.diagnose.log_line import LogLine
from maintain import logging_statements
from tests.conftest import RELEASES
from tests.diagnose import releases
from tests.diagnose.releases import CORE, bare, fail, files

NEWEST = "0.5.6"


def logged(release: str, message: str, *values: Any, which: str = "") -> str:
    """A line of this release. which: part of the template, where the release has several."""
    found = [p for p in releases.places(release, message) if which in ast.unparse(p.text)]
    assert found, f"{release} does not log {message}"
    return releases.line(found[0], *values)[0]


def crash(release: str, message: str, *values: Any) -> str:
    return fail(releases.places(release, message)[0], *values)


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
    function = next(
        node
        for parent in ast.walk(tree)
        if isinstance(parent, ast.ClassDef) and parent.name == "LoggingStatLogger"
        for node in parent.body
        if isinstance(node, ast.FunctionDef) and node.name == "log"
    )
    found = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "%" in node.value
    ]
    return sorted(found, key=ast.unparse(function).index)


def vllm(message: str, *values: Any, release: str = "0.32.0", which: str = "") -> str:
    """A line of vLLM: its release's own statement, as statements.json has it, with these values."""
    for row in statements.known()["vllm"]:
        if row.message == message and release in row.lines and which in row.template:
            return framed(row.template, *values, at=f"{row.file}:{row.lines[release][0]}")
    raise AssertionError(f"vLLM {release} does not log {message}")


def vllm_unread(file: str, words: str, *values: Any) -> str:
    """A line of the installed vLLM that the grammar does not read."""
    place = releases.statement(site_packages() / file, words)
    return framed(logging_statements.template(place.text) or "", *values, at=f"{Path(file).name}:{place.node.lineno}")


def framed(template: str, *values: Any, at: str) -> str:
    text = template.format(*values) if "{}" in template else template % values
    return f"(EngineCore_DP0 pid=276) WARNING 12-03 01:24:36 [{at}] {text}\n"


def unread(release: str, file: str, words: str, *values: Any) -> str:
    """A line of this LMCache release that the grammar does not read. file: below `lmcache/`."""
    return releases.line(releases.statement(RELEASES / release / "lmcache" / file, words, release), *values)[0]


def diagnose(*lines: str) -> Diagnosis:
    return diagnosed("".join(lines).encode())


def codes(log: Diagnosis) -> list[str]:
    return [found.rule.code for found in log.findings]


def asked(release: str, total: int, computed: int, hit: int, need: int, request: str = "cmpl-1") -> str:
    if releases.places(release, "asked")[0].release < "0.3.14" or release.startswith(("0.3.9", "0.3.10")):
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


def adapter(release: str) -> Path:
    return files(release)[V1][0]


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


def scanned(log: bytes, file: str = "log") -> list[LogLine]:
    """Every line that means something of a log in memory."""
    scanner = Scanner(file)
    return [*scanner.scan(log), *scanner.end()]
