"""The records of known problems: their schema, their signs in the released source, and the codes that are retired."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest
from ahocorasick_rs import AhoCorasick
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix_tools.diagnose import checks, findings
from kvfix_tools.diagnose.problems import FILE, Problem, catalogue, knowledge
from kvfix_tools.diagnose.signs import PLACE, Sign, parse
from kvfix_tools.explain import explain
from maintain import knowledge as maintained
from tests.conftest import RELEASES, release_names
from tests.diagnose.lines import site_packages

EVERY = pytest.mark.parametrize("problem", catalogue(), ids=lambda problem: str(problem.name))


def test_the_compiled_records_are_current() -> None:
    assert FILE.read_text() == maintained.compiled(), "run `make knowledge`"


def test_the_records_stay_small() -> None:
    files = sorted(maintained.FOLDER.glob("*.toml"))
    assert sum(len(file.read_text().splitlines()) for file in files) <= 10_000


@EVERY
def test_the_record_is_whole(problem: Problem) -> None:
    assert re.fullmatch(r"KVD(?:\d{3}|[1-9]\d{3})", problem.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", problem.name)
    assert problem.title.endswith(".")
    assert "\n" not in problem.title
    assert bool(problem.signs) != bool(problem.on)
    assert problem.cause.endswith(".") or problem.fixes
    assert len(problem.now) < (400 if problem.signs else 700)
    assert problem.now or problem.fixes or problem.code == "KVD199"
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each) for each in problem.seen)
    for specifier in problem.releases.values():
        SpecifierSet(specifier)


def test_a_record_without_signs_is_decided_by_a_function_or_has_a_sentence() -> None:
    by_name = {each.name: each for each in catalogue() if each.on}
    assert not findings.functions().keys() - by_name.keys()
    assert all(each.sentence for name, each in by_name.items() if name not in findings.functions())


def test_codes_and_names_are_unique() -> None:
    assert len({each.code for each in catalogue()}) == len(catalogue())
    assert len({each.name for each in catalogue()}) == len(catalogue())


def test_no_retired_code_is_used_again() -> None:
    every = {each.code for each in catalogue()}
    assert not every & knowledge().retired.keys()
    assert not {code for each in catalogue() for code in each.replaces} - every


def test_explain_says_that_a_code_is_retired(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("kvd003", json=False) == 0
    assert capsys.readouterr().out.startswith("KVD003 is retired: it was about software that kvfix does not cover")
    assert explain("KVD003", json=True) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"code", "retired"}


@pytest.mark.parametrize(
    ("sign", "read"),
    [
        ("lost <key>", (Sign("raised", text="lost <key>"), Sign("logged", text="lost <key>"))),
        ("ValueError: Unsupported type: <name>", (Sign("raised", "ValueError", "Unsupported type: <name>"),)),
        ("KeyError in scheduler.py:update", (Sign("raised", "KeyError", within="scheduler.py:update"),)),
        ("nixlBackendError", (Sign("raised", "nixlBackendError"),)),
        ("CUDA error in to_tensor()", (Sign("raised", text="CUDA error", within="to_tensor"),)),
        ("KeyError at `assert a in b` in x.py:f", (Sign("raised", "KeyError", "", "x.py:f", "assert a in b"),)),
        ("TypeError: not <kind> in lmcache/", (Sign("raised", "TypeError", "not <kind>", "lmcache/"),)),
        ("KeyError via kv_offload/", (Sign("raised", "KeyError", through="kv_offload/"),)),
        ("failed in a loop", (Sign("raised", text="failed in a loop"), Sign("logged", text="failed in a loop"))),
        ("died: exit code: -9", (Sign("died", text="exit code: -9"),)),
        ("died: in mooncake::Session::writeBody", (Sign("died", within="mooncake::Session::writeBody"),)),
        ("died: std::bad_alloc", (Sign("died", text="std::bad_alloc"),)),
        ("stack: mq.py:register", (Sign("stack", within="mq.py:register"),)),
    ],
)  # fmt: skip
def test_a_sign_is_one_line(sign: str, read: tuple[object, ...]) -> None:
    assert parse(sign) == read


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('efect = "crash"', "efect"),
        ('effect = "bad"', "'bad'"),
        ("signs = 'no list'", "signs"),
        ("why = ", "Invalid value"),
    ],
)
def test_a_mistake_names_the_file_and_the_record(line: str, says: str, tmp_path: Path) -> None:
    fields = {
        "code": '"KVD9999"', "title": '"It fails."', "effect": '"crash"', "signs": '["it failed"]',
        "why": '"It does."', "do": '"restart it"',
    }  # fmt: skip
    rows = [f"{key} = {value}" for key, value in fields.items() if not line.startswith(key)]
    file = tmp_path / "any.toml"
    file.write_text("\n".join(["[it-fails]", *rows, line, ""]))
    with pytest.raises(maintained.Mistake) as found:
        maintained.records(file)
    assert str(found.value).startswith("any.toml: ")
    assert says in str(found.value)
    file.write_text("\n".join(["[it-fails]", *(f"{key} = {value}" for key, value in fields.items()), ""]))
    assert maintained.records(file)[0]["name"] == "it-fails"


#: The first releases that the records cover. All of LMCache are here, and one of vLLM. checks.json has what the other
#: releases of vLLM raise and assert.
FIRST = {"lmcache": Version("0.3.9"), "vllm": Version("0.11.2")}
#: Between two literals of one string.
_JOINT = re.compile(r"""["']\s*\n\s*[rbf]*["']""")
#: A shorter text stands anywhere.
_SHORTEST = 6

#: {dist: releases}
Found = dict[str, frozenset[str]]


def needle(sign: Sign) -> str:
    """Return the part of the sign that the source must have: of its text, its line, or its function."""
    if sign.text:
        return _plain(max(PLACE.split(sign.text)[::2], key=len))
    if sign.form in ("logged", "died"):
        return ""
    if sign.source:
        return _plain(sign.source.removeprefix("assert "))
    return f"def{sign.within.rpartition(':')[2]}(" if sign.within and not sign.within.endswith("/") else ""


def _plain(text: str) -> str:
    """Without white space, and with one kind of quotes."""
    return re.sub(r"\s+", "", text.replace("\\", "")).replace('"', "'")


def claimed(problem: Problem, dist: str) -> list[str]:
    """Releases that the record covers, of those that were examined."""
    inside = SpecifierSet(problem.releases.get(dist, ""), prereleases=True)
    right = Version(problem.fixed[dist]) if dist in problem.fixed else None
    return [
        each
        for each in checks.known()[dist][0]
        if Version(each) >= FIRST[dist] and each in inside and (right is None or Version(each) < right)
    ]


@lru_cache(maxsize=1)
def anchors() -> dict[str, Found]:
    """{needle of a sign: the releases in whose source it stands}"""
    needles = sorted({part for each in catalogue() for sign in each.shows if len(part := needle(sign)) >= _SHORTEST})
    search = AhoCorasick(needles)
    found: dict[str, dict[str, set[str]]] = {part: {"lmcache": set(), "vllm": set()} for part in needles}

    def look(text: str, dist: str, releases: set[str]) -> None:
        for index in {match[0] for match in search.find_matches_as_indexes(text, overlapping=True)}:
            found[needles[index]][dist] |= releases

    for release in release_names():
        look(_source(RELEASES / release / "lmcache"), "lmcache", {release})
    look(_source(site_packages() / "vllm"), "vllm", {"0.32.0"})
    for (_, function, check), releases in checks.known()["vllm"][1].items():
        look("\n".join((_plain(check.text), _plain(check.condition), f"def{function}(")), "vllm", releases)
    return {part: {dist: frozenset(some) for dist, some in each.items() if some} for part, each in found.items()}


def _source(package: Path) -> str:
    files = (_plain(_JOINT.sub("", path.read_text(errors="replace"))) for path in sorted(package.rglob("*.py")))
    return "\n".join(files)


@EVERY
def test_the_signs_stand_in_the_releases_that_the_record_covers(problem: Problem) -> None:
    """In each of these releases one of them does, unless a library prints it or the record says why it does not."""
    if problem.said_by or problem.unanchored:
        return
    found = [anchors().get(needle(sign), {}) for sign in problem.shows]
    by_dist = {dist: set().union(*(each.get(dist, set()) for each in found)) for dist in ("lmcache", "vllm")}
    for sign, places in zip(problem.shows, found, strict=True):
        assert any(places[dist] & set(claimed(problem, dist)) for dist in places), f"{sign} is in no release"
    dists = [dist for dist, releases in by_dist.items() if releases]
    known = by_dist["vllm"] != {"0.32.0"}  # of another release of vLLM only what it raises is known
    if len(dists) == 1 and (dists[0] == "lmcache" or known):
        missing = [each for each in claimed(problem, dists[0]) if each not in by_dist[dists[0]]]
        assert not missing, f"narrow `releases`: no sign stands in {missing}"


def test_hardly_any_record_is_without_an_anchor() -> None:
    without = [each.code for each in catalogue() if each.unanchored]
    assert len(without) < 0.2 * len(catalogue()), without
