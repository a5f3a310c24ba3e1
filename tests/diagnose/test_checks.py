"""The releases that have the code of an unknown failure, made from the code of the installed releases."""

from __future__ import annotations

import pytest

from kvfix_tools.diagnose import checks
from kvfix_tools.diagnose.checks import Check
from maintain import statements as released
from tests.conftest import RELEASES
from tests.diagnose.lines import CORE, NEWEST, diagnose, raised, site_packages

PACKAGES = {"lmcache": (NEWEST, RELEASES / NEWEST / "lmcache"), "vllm": ("0.32.0", site_packages() / "vllm")}
#: A check that no record names, with a text; and an assertion without one.
RAISED = "lmcache/v1/kv_layer_groups.py", "parse_kvcache_shape_spec", "KV shape specification cannot be empty"
ASSERTED = "vllm/v1/core/kv_cache_utils.py", "__init__", "target_block_size % hash_block_size == 0"


def failed(text: str = RAISED[2], function: str = RAISED[1], file: str = RAISED[0]) -> str:
    return raised([(file, function, f'raise ValueError("{text}")')], f"ValueError: {text}")


def asserted(source: str = ASSERTED[2], function: str = ASSERTED[1]) -> str:
    return raised([(ASSERTED[0], function, f"assert {source}")], "AssertionError")


def sentence(*lines: str) -> str:
    log = diagnose(*lines)
    assert len(log.findings) == 1
    return log.findings[0].sentence


@pytest.mark.parametrize("dist", PACKAGES)
def test_the_file_has_what_the_release_has(dist: str) -> None:
    """`make statements` was run."""
    release, package = PACKAGES[dist]
    releases, table = checks.known()[dist]
    taken: checks.Table = {}
    released.take_checks(taken, release, package)
    assert release in releases
    assert {place for place, having in table.items() if release in having} == set(taken)


def test_it_names_the_releases_and_the_condition() -> None:
    assert sentence(failed()).endswith(
        f", raised by LMCache, because this was true: `not spec_str`; LMCache has this code from 0.3.11 to {NEWEST}, "
        "the newest known release, so an upgrade does not help"
    )


def test_an_assertion_without_a_text_is_found_by_its_code() -> None:
    assert "; vLLM has this code from 0.12.0 to " in sentence(asserted())
    assert "has this code" not in sentence(asserted(function="another"))
    assert "has this code" not in sentence(asserted(source="target_block_size == 0"))


@pytest.mark.parametrize(
    "other",
    [{"function": "another"}, {"text": "another text"}, {"file": "lmcache/v1/another.py"}, {"file": "x.py"}],
)
def test_near_misses(other: dict[str, str]) -> None:
    assert "has this code" not in sentence(failed(**other))


def test_a_release_that_has_it_no_more_is_named_as_no_promise() -> None:
    """For each removed check, the last release that has it is not the newest, and the next release is named."""
    releases, table = checks.known()["lmcache"]
    place, having = next(
        (place, having)
        for place, having in sorted(table.items())
        if place[2].kind == "ValueError" and len(place[2].text) > 40 and "{" not in place[2].text
        if releases[-1] not in having and not _elsewhere(table, place[2], having)
    )
    last = max(having, key=releases.index)
    after = releases[releases.index(last) + 1]
    said = checks.said_of(
        diagnose(failed(place[2].text, place[1], f"lmcache/{place[0]}")).failures.raised[0], diagnose("").releases
    )
    assert f"{last}, but not in {after}, which may still have the cause" in said


def _elsewhere(table: checks.Table, check: Check, having: set[str]) -> bool:
    return any(other[2].text == check.text and some - having for other, some in table.items())


def test_a_release_without_the_check_is_not_called_one_that_has_it() -> None:
    """A log that names a release without the check comes from changed code."""
    line = "(EngineCore pid=7) INFO 12-03 01:24:31 [core.py:9] Initializing a V1 LLM engine (v0.11.0) with config: x\n"
    said = sentence(line, asserted())
    assert "has this code" not in said


def test_a_line_without_frames_is_found_by_its_words() -> None:
    assert "because this was true: `not spec_str`" in sentence(f"{CORE}ValueError: {RAISED[2]}\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if a:\n    raise E('x {}'.format(1))", []),
        ("if a:\n    if b:\n        raise m.E(f'x {c}')\n    else:\n        raise E('y')",
         [("E", "x {}", "b"), ("E", "y", "")]),
        ("assert a, 'x'\nassert b", [("assert", "x", "a"), ("assert", "", "b")]),
        ("if a:\n    def f():\n        logger.error('x %s', 1)\nlogger.info('y')", [("", "x %s", "")]),
    ],
)  # fmt: skip
def test_what_is_taken_of_a_file(code: str, expected: list[tuple[str, str, str]]) -> None:
    assert [tuple(check) for _, check in released.checks_in(code.encode())] == expected
