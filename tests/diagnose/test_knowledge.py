"""Test the records of known problems. Released source has their signs (texts of logs). No log line fits two records."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import pytest
from ahocorasick_rs import AhoCorasick
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvfix_tools.diagnose import findings, statements
from kvfix_tools.diagnose.grammar import FILE
from kvfix_tools.diagnose.problems import Problem, catalogue
from kvfix_tools.diagnose.signs import PLACE, Sign, parse
from maintain import knowledge as maintained
from tests.conftest import RELEASES, release_names
from tests.diagnose.lines import LMCACHE, VLLM, codes, diagnose, raised, site_packages

EVERY = pytest.mark.parametrize("problem", catalogue(), ids=lambda problem: str(problem.name))


def test_the_compiled_records_are_current() -> None:
    assert FILE.read_text() == maintained.compiled(), "run `make knowledge`"


def test_the_records_stay_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in sorted(maintained.FOLDER.glob("*.toml"))) <= 10_000


@EVERY
def test_the_record_is_whole(problem: Problem) -> None:
    assert re.fullmatch(r"KVD(?:\d{3}|[1-9]\d{3})", problem.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", problem.name)
    assert problem.title.endswith(".")
    assert "\n" not in problem.title
    assert bool(problem.signs) != bool(problem.on)
    assert problem.why.endswith(".") or problem.fixes
    assert len(problem.do) < (400 if problem.signs else 700)
    assert problem.do or problem.fixes or problem.code == "KVD199"
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each) for each in problem.seen)
    for specifier in problem.releases.values():
        SpecifierSet(specifier)


def test_a_record_without_signs_is_decided_by_a_function_or_has_a_sentence() -> None:
    by_name = {each.name: each for each in catalogue() if each.on}
    assert findings.functions().keys() <= by_name.keys()
    for name in by_name.keys() - findings.functions().keys():
        case = by_name[name].case
        assert case if isinstance(case, str) else case.keys() == set(by_name[name].on)


def test_codes_and_names_are_unique_and_known() -> None:
    codes = {each.code for each in catalogue()}
    assert len(codes) == len({each.name for each in catalogue()}) == len(catalogue())
    assert not {code for each in catalogue() for code in each.replaces} - codes


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
    [('efect = "crash"', "efect"), ('effect = "bad"', "'bad'"), ("signs = 'no list'", "signs"), ("why = ", "Invalid")],
)
def test_a_mistake_names_the_file_and_the_record(line: str, says: str, tmp_path: Path) -> None:
    fields = {
        "code": '"KVD9999"', "title": '"It fails."', "effect": '"crash"', "signs": '["it failed"]',
        "why": '"It does."', "do": '"restart it"',
    }  # fmt: skip
    rows = [f"{key} = {value}" for key, value in fields.items() if not line.startswith(key)]
    file = tmp_path / "any.toml"
    file.write_text("\n".join(["[it-fails]", *rows, line, ""]))
    with pytest.raises(SystemExit) as found:
        maintained.records(file)
    assert str(found.value).startswith("knowledge: any.toml: ")
    assert says in str(found.value)
    file.write_text("\n".join(["[it-fails]", *(f"{key} = {value}" for key, value in fields.items()), ""]))
    assert maintained.records(file)[0]["name"] == "it-fails"


#: The first examined releases. The tests read the source of vLLM 0.32.0, and checks.json for other releases of vLLM.
FIRST = {"lmcache": Version("0.3.9"), "vllm": Version("0.11.2")}
_JOINT = re.compile(r"""["']\s*\n\s*[rbf]*["']""")  # the gap between two literals of one string
_SHORTEST = 6  # a shorter needle could be in any source


def needle(sign: Sign) -> str:
    """Return the text that the source must have: part of a message, a line of source, or the head of a function."""
    if sign.text:
        return _plain(max(PLACE.split(sign.text)[::2], key=len))
    if sign.form in ("logged", "died"):
        return ""
    if sign.source:
        return _plain(sign.source.removeprefix("assert "))
    return f"def{sign.within.rpartition(':')[2]}(" if sign.within and not sign.within.endswith("/") else ""


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text.replace("\\", "")).replace('"', "'")


def claimed(problem: Problem, dist: str) -> list[str]:
    """Return the examined releases that the record covers."""
    inside = SpecifierSet(problem.releases.get(dist, ""), prereleases=True)
    right = Version(problem.fixed_in[dist]) if dist in problem.fixed_in else None
    return [
        each
        for each in statements.checks()[dist][0]
        if Version(each) >= FIRST[dist] and each in inside and (right is None or Version(each) < right)
    ]


@lru_cache(maxsize=1)
def anchors() -> dict[str, dict[str, frozenset[str]]]:
    """Return {text: {distribution: releases whose source has the text}}. `needle` returns the text of a sign."""
    needles = sorted({part for each in catalogue() for sign in each.shows if len(part := needle(sign)) >= _SHORTEST})
    search = AhoCorasick(needles)
    found: dict[str, dict[str, set[str]]] = {part: {"lmcache": set(), "vllm": set()} for part in needles}

    def look(text: str, dist: str, releases: set[str]) -> None:
        for index in {match[0] for match in search.find_matches_as_indexes(text, overlapping=True)}:
            found[needles[index]][dist] |= releases

    for release in release_names():
        look(_source(RELEASES / release / "lmcache"), "lmcache", {release})
    look(_source(site_packages() / "vllm"), "vllm", {"0.32.0"})
    for (_, function, check), releases in statements.checks()["vllm"][1].items():
        look("\n".join((_plain(check.text), _plain(check.condition), f"def{function}(")), "vllm", releases)
    return {part: {dist: frozenset(some) for dist, some in each.items() if some} for part, each in found.items()}


def _source(package: Path) -> str:
    files = (_plain(_JOINT.sub("", path.read_text(errors="replace"))) for path in sorted(package.rglob("*.py")))
    return "\n".join(files)


@EVERY
def test_the_signs_stand_in_the_releases_that_the_record_covers(problem: Problem) -> None:
    """Find a sign in the source of each release that the record covers. Skip records with `said_by` or `unanchored`."""
    if problem.said_by or problem.unanchored:
        return
    found = [anchors().get(needle(sign), {}) for sign in problem.shows]
    by_dist = {dist: set().union(*(each.get(dist, set()) for each in found)) for dist in ("lmcache", "vllm")}
    for sign, places in zip(problem.shows, found, strict=True):
        assert any(places[dist] & set(claimed(problem, dist)) for dist in places), f"{sign} is in no release"
    dists = [dist for dist, releases in by_dist.items() if releases]
    known = by_dist["vllm"] != {"0.32.0"}  # checks.json lacks most log lines of other vLLM releases
    if len(dists) == 1 and (dists[0] == "lmcache" or known):
        missing = [each for each in claimed(problem, dists[0]) if each not in by_dist[dists[0]]]
        assert not missing, f"narrow `releases`: no sign stands in {missing}"


#: {pattern of compiled libraries in nixl's wheel: records whose signs these libraries print}
COMPILED = {
    "nixl_cu1*.libs/**/libuc*.so*": [
        each
        for each in catalogue()
        if each.name in ("ucx-cannot-address-peer", "ucx-has-no-way-for-this-memory", "ucx-cuda-ipc-refused")
    ],
    ".nixl_cu1*.mesonpy.libs/**/lib[np]*.so*": [each for each in catalogue() if 1150 <= int(each.code[3:]) <= 1170],
}


@pytest.mark.parametrize("pattern", COMPILED)
def test_signs_of_a_library_stand_in_it(pattern: str) -> None:
    """NIXL logs a function name before a message, and UCX logs a level. The library files lack these prefixes."""
    libraries = sorted(site_packages().glob(pattern))
    if not libraries:
        pytest.skip("nixl is not installed here, so that there is no library to look into")
    texts = b"".join(path.read_bytes() for path in libraries)
    assert len(COMPILED[pattern]) >= 3
    for sign in (sign for problem in COMPILED[pattern] for sign in problem.shows):
        for part in PLACE.split(re.sub(r"^(UCX  ERROR |\w+: )", "", sign.text))[::2]:
            assert part.strip().encode() in texts, sign


def test_hardly_any_record_is_without_an_anchor() -> None:
    without = [each.code for each in catalogue() if each.unanchored]
    assert len(without) < 0.2 * len(catalogue()), without


RAN = "INFO 12-03 01:24:31 [factory.py:64] Creating v1 connector with name: {} and\n"


def shown(problem: Problem, sign: Sign) -> str:
    file, _, function = sign.within.rpartition(":")
    if sign.form == "logged":
        return (VLLM if "vllm" in problem.releases else LMCACHE).format(level="ERROR", text=PLACE.sub("7", sign.text))
    if sign.form == "stack":
        return f"Thread 4242 (active+gil)\n    {function} (lmcache/{file}:7)\n    run (threading.py:9)\n"
    if sign.form == "died":
        if not sign.within:
            text = PLACE.sub("7", sign.text)
            return f"library.cpp:77: {text}: Assertion `held' failed.\n" if text.isidentifier() else f"ERROR {text}\n"
        if "::" in sign.within:  # a function of C++
            file, function = "", sign.within
        return (
            f"Fatal Python error: {sign.text or 'Segmentation fault'}\n\n"
            "Current thread 0x00007f (most recent call first):\n"
            f'  File "/opt/app/{file or "any.py"}", line 7 in {function}\n'
            '  File "/opt/app/vllm/core.py", line 9 in run\n\n'
        )
    path = file or ("any.py" if problem.general else "lmcache/any.py")
    text = f": {PLACE.sub('7', sign.text)}" if sign.text else ""
    caller = sign.through if sign.through.endswith(".py") else f"{sign.through}/caller.py"
    frames = [(caller, "call", "call()")] if sign.through else []
    return raised([*frames, (path, function or "any", sign.source or "call()")], f"{sign.kind or 'RuntimeError'}{text}")


_VERSION = re.compile(r"\d[\w.]*")


def meet(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if the ranges overlap for each distribution. Overlapping ranges both contain one of `bounds`."""
    for dist in one.keys() & other.keys():
        bounds = ["0", *_VERSION.findall(one[dist]), *_VERSION.findall(other[dist])]
        ranges = [SpecifierSet(each[dist], prereleases=True) for each in (one, other)]
        if not any(all(bound in each for each in ranges) for bound in bounds):
            return False
    return True


def second(problem: Problem, log: str) -> list[str]:
    """Return the codes of the log's findings. Omit `problem`, and records that share no release with `problem`."""
    known = {each.code: each for each in catalogue()}
    records = {code: known.get(code) for code in codes(diagnose(log)) if code != problem.code}
    return [code for code, record in records.items() if record is None or meet(problem.releases, record.releases)]


@EVERY
def test_a_line_is_one_record(problem: Problem) -> None:
    """A sign yields one finding, and so one remedy. A second finding is right only if no release has both problems."""
    head = RAN.format(problem.connectors[0]) if problem.named else ""
    for sign in problem.shows:
        if sign == Sign("raised", text=sign.text) and Sign("logged", text=sign.text) in problem.shows:
            continue  # the sign `logged` with the same text is tested too
        assert second(problem, head + shown(problem, sign)) == [], sign
