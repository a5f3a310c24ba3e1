import copy
import json
import re
import shutil
import subprocess
import sys
from itertools import chain, product
from pathlib import Path

import pytest

from kvfix import catalogue
from kvfix_tools.diagnose import problems
from kvfix_tools.lab.engine import rules as lab_rules
from kvfix_tools.ledger import RULES
from maintain import scenario_matrix
from maintain.documentation import error_index, mkdocs_hook, support_matrix
from maintain.documentation.diagnose_picture import picture
from tests.conftest import ROOT, clean_environment
from tests.diagnose.lines import real

#: {page: text that the test adds}. The texts link to missing pages or headings, and the navigation lacks alone.md.
PLANTED = {
    "docs/faq.md": "[gone](nowhere.md) and [gone](matrix.md#lmcache-9.9)",
    "README.md": "[gone](docs/nothing.md)",
    "docs/alone.md": "# Not in the navigation",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without vLLM, LMCache and torch. mkdocs writes all pages, then fails because of PLANTED."""
    root, missing = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("missing")
    for name in ("vllm", "lmcache", "torch"):
        (missing / f"{name}.py").write_text("raise ImportError('the documentation is built without it')")
    shutil.copytree(ROOT / "docs", root / "docs")
    for name in ("mkdocs.yml", *mkdocs_hook.TOP):
        shutil.copy(ROOT / name, root)
    (root / "tools").symlink_to(ROOT / "tools")
    for page, text in PLANTED.items():
        with (root / page).open("a") as file:
            file.write(f"\n{text}\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"],
        cwd=root, env=clean_environment(missing, NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert all(word in output for word in ("nowhere.md", "lmcache-9.9", "nothing.md", "alone.md", "4 warnings")), output
    return root / "site"


def test_there_is_a_page_for_everything(site: Path) -> None:
    for folder, codes in {
        "fixes": [each.code for each in catalogue.fixes()],
        "findings": [each.code for each in problems.catalogue()],
        "rules": [each.code for each in (*RULES, *lab_rules.RULES)],
    }.items():
        assert ({page.stem.upper() for page in (site / folder).glob("*.html")} - {"INDEX"}) == set(codes)
        index = (site / folder / "index.html").read_text()
        assert all(f'href="{code.lower()}.html"' in index for code in codes)


def test_the_site_is_small_and_takes_nothing_from_elsewhere(site: Path) -> None:
    """The site loads no font, script, style or picture from other sites. Links for the reader may lead elsewhere."""
    fetched = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*href=\"(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", file.read_text()), file
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 15_000_000


def found(site: Path, queries: list[str]) -> list[list[str]]:
    """Return for each query the pages that the search of the site shows. The best page comes first."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the search of the site runs in it")
    asked = subprocess.run(
        [node, str(ROOT / "tests/docs/search.js"), str(site)],
        input=json.dumps(queries), capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    return [[page.removesuffix(".html").upper() for page in pages] for pages in json.loads(asked.stdout)]


@pytest.mark.parametrize("head", ["", "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [core.py:712] "])
def test_search_finds_the_page_of_each_message(site: Path, head: str) -> None:
    """Search for each message of the page "I see this error", without and with the prefix of a log line."""
    entries = error_index.entries()
    queries = [head + entry.text.replace("…", "…" if not head else "1517") for entry in entries]
    ranks = [
        min((rank for rank, page in enumerate(pages, 1) if page[-6:] in entry.findings + entry.fixes), default=99)
        for entry, pages in zip(entries, found(site, queries), strict=True)
    ]
    assert not [(rank, query) for rank, query in zip(ranks, queries, strict=True) if rank > 3]
    assert ranks.count(1) > 0.95 * len(entries), f"{ranks.count(1)} of {len(entries)} first"


def test_search_finds_the_best_known_crash(site: Path) -> None:
    pages, unknown = found(site, ["Mismatch in tokens to load", "zzqx 4711"])
    assert pages[:2] == ["FIXES/KVF001", "FINDINGS/KVD101"]
    assert unknown == []


PAIRS = scenario_matrix.load((ROOT / "docs/matrix.json").read_text())


def letters(pairs: scenario_matrix.Pairs, code: str) -> dict[tuple[str, str], str]:
    """Return the letter of each (vLLM, LMCache) pair for one fix. support_matrix.py explains what each letter means."""
    made = support_matrix.data(pairs)
    rows = next(fix["cells"] for fix in made["fixes"] if fix["code"] == code)
    return dict(zip(product(made["vllm"], made["lmcache"]), chain(*rows), strict=True))


def test_the_pair_page_has_what_the_lab_ran_and_bugs_that_the_code_has() -> None:
    """The lab plays few scenarios with old releases. So the page also shows bugs found in the code of old releases."""
    crash = letters(PAIRS, "KVF001")
    assert crash.keys() == PAIRS.keys()
    assert {lmcache for (_, lmcache), letter in crash.items() if letter == "F"} == {"0.3.10"}
    dates = support_matrix.when_played(PAIRS)
    assert all(played["date"] in dates for played in PAIRS.values())
    crash = letters({pair: {**played, "outcomes": []} for pair, played in PAIRS.items()}, "KVF001")
    assert {lmcache for (_, lmcache), letter in crash.items() if letter == "C"} == {"0.3.10"}
    assert "F" not in crash.values()


def test_the_pair_page_shows_bugs_that_are_not_fixed_and_pairs_that_could_not_be_played() -> None:
    pairs, pair = copy.deepcopy(PAIRS), ("0.32.0", "0.3.10")
    for row in pairs[pair]["outcomes"]:
        if row["scenario"] == "mismatch-in-tokens-to-load":
            row["fixed"] = "violated"
    pairs["0.32.0", "0.5.6"] = {"date": "2026-01-01", "python": "3.11", "code": "x", "why": "ImportError: no"}
    assert [each for each, letter in letters(pairs, "KVF001").items() if letter == "N"] == [pair]
    assert support_matrix.NOT_FIXED in support_matrix.of_fix(pairs, "KVF001")
    assert support_matrix.data(pairs)["failed"] == {"0.32.0 0.5.6": "ImportError: no"}


def test_the_matrix_of_a_fix_has_every_pair() -> None:
    head, _, *rows = support_matrix.of_fix(PAIRS, "KVF001").partition("\n\n")[0].splitlines()
    assert head.endswith(" | 0.3.9 to 0.3.9.post2 | 0.3.10 | 0.3.10.post1 to 0.5.6 |")
    assert len(rows) == len({vllm for vllm, _ in PAIRS})
    assert "No scenario of the lab shows this bug" in support_matrix.of_fix(PAIRS, "KVF902")


@pytest.mark.parametrize(
    ("words", "findings", "fixes"),
    [
        ("Mismatch in tokens to load", ("KVD101", "KVD102"), ("KVF001", "KVF003")),
        ("Preempted request", ("KVD103", "KVD105", "KVD106", "KVD107"), ("KVF002",)),
        ("Timeout occurred for rank", ("KVD203",), ("KVF015",)),
    ],
)
def test_messages_lead_to_their_findings_and_fixes(words: str, findings: object, fixes: object) -> None:
    entry = next(entry for entry in error_index.entries() if words in entry.text)
    assert (entry.findings, entry.fixes) == (findings, fixes)


def test_no_message_is_left_without_an_answer() -> None:
    assert all(entry.findings or entry.fixes for entry in error_index.entries())
    found = {code for entry in error_index.entries() for code in entry.findings}
    # by_text leaves out problems that kvfix finds only at the log's end or in lines of kind asked, stats or retrieved.
    by_text = [rule for rule in problems.catalogue() if not {"", "asked", "stats", "retrieved"} >= set(rule.on)]
    # KVD117 and KVD112 have the same line (LMCache's failed assertion). The page lists only KVD112 for this line. No
    # pattern of diagnose/grammar.py matches the lines of KVD212 and KVD213.
    others = [rule.code for rule in by_text if rule.on and rule.code not in found]
    assert sorted(others) == ["KVD117", "KVD212", "KVD213"]
    page = error_index.messages()
    assert all(f"findings/{code.lower()}.md" in page for code in found)


def test_what_can_be_abused_is_named_where_reports_go() -> None:
    """SECURITY.md names the fixes whose patches go to vLLM in private first."""
    private = {each.code for each in catalogue.fixes() if any("SECURITY.md" in why for why in each.no_patch.values())}
    _, _, listed = " ".join((ROOT / "SECURITY.md").read_text().split()).partition("no patch in")
    assert set(re.findall(r"KVF\d+", listed)) == private


def test_the_picture_is_of_the_present_program() -> None:
    made = picture(real("crash-0.3.10"))
    assert made == (ROOT / "docs/diagnose.svg").read_text(), "run python -m maintain documentation.diagnose_picture"
