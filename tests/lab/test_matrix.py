"""docs/matrix.json, which `make matrix` writes: it covers what there is, and everything came out as it must."""

import pytest

from kvfix_tools.lab import releases
from kvfix_tools.lab.scenario import scenarios
from maintain.scenario_matrix import FILE, VLLM_RELEASES, deviations, dump, load
from tests.conftest import ROOT, release_names

TEXT = (ROOT / FILE).read_text()
PAIRS = load(TEXT)


def test_the_file_is_as_it_would_be_written() -> None:
    assert dump(PAIRS) == TEXT


def test_it_covers_every_release() -> None:
    vllm = {pair[0] for pair in PAIRS}
    assert vllm > {name for file in VLLM_RELEASES for name in (ROOT / file).read_text().split()}, "run `make matrix`"
    assert set(PAIRS) == {(one, other) for one in vllm for other in release_names()}, "run `make matrix`"


def test_it_covers_every_scenario() -> None:
    slugs = {scenario.slug for scenario in scenarios()}
    for pair, played in PAIRS.items():
        assert {row["scenario"] for row in played["outcomes"]} == slugs, f"{pair}: run `make matrix`"


def test_all_is_as_expected() -> None:
    assert deviations(PAIRS) == []


@pytest.mark.parametrize("fixed", ["violated", "clean"])
def test_same_rows_are_one_line_and_what_deviates_is_listed(fixed: str) -> None:
    row = {"scenario": "s", "expected": "violated", "released": "violated", "fixed": fixed}
    run = {"date": "2026-01-01", "python": "3.11", "code": "x"}
    good = {**run, "outcomes": [{**row, "as_expected": fixed == "clean"}]}
    pairs = {("0.9", "0.3.9"): good, ("0.9", "0.3.10"): good, ("0.10", "0.3.9"): {**run, "why": "ImportError: no"}}
    text = dump(pairs)
    assert load(text) == pairs
    assert text.count('"lmcache": "0.3.9 0.3.10"') == 2
    listed = ["vLLM 0.10, LMCache 0.3.9: ImportError: no"]
    if fixed == "violated":
        listed += [
            f"vLLM 0.9, LMCache {release}: s: expected violated, is violated, with fixes violated"
            for release in ("0.3.9", "0.3.10")
        ]
    assert sorted(deviations(load(text))) == sorted(listed)


def test_an_outcome_depends_on_code_and_not_on_texts() -> None:
    texts = b'"""A bug."""\n\ndef fix(blocks):\n    """Fix it."""\n    # as decode\n    return blocks[1:]\n'
    code = releases._without_texts(b"def fix(blocks):\n    return blocks[1:]\n")
    assert releases._without_texts(texts) == code
    assert releases._without_texts(b"def fix(blocks):\n    return blocks[2:]\n") != code
