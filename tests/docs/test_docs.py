"""The documentation: built as CI and `make docs` build it, where a warning is an error; and the pages that are made."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfix import catalogue
from kvfix_tools.diagnose import findings, problems
from kvfix_tools.lab import rules as lab_rules
from kvfix_tools.ledger import RULES
from maintain import documentation, scenario_matrix
from maintain.documentation import error_index, support_matrix
from maintain.documentation.diagnose_picture import picture
from maintain.documentation.markdown import span
from tests.conftest import ROOT, clean_environment


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root, env=clean_environment(NO_MKDOCS_2_WARNING="1"), capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_there_is_a_page_for_everything(site: Path) -> None:
    for folder, codes in {
        "fixes": [each.code for each in catalogue.fixes()],
        "findings": [each.code for each in (*findings.catalogue(), *problems.catalogue())],
        "rules": [each.code for each in (*RULES, *lab_rules.RULES)],
    }.items():
        pages = {page.stem.upper() for page in (site / folder).glob("*.html")} - {"INDEX"}
        assert pages == set(codes)
        index = (site / folder / "index.html").read_text()
        assert all(f'href="{code.lower()}.html"' in index for code in codes)


def test_the_site_takes_nothing_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture; what leads elsewhere are links that a reader follows."""
    fetched = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*href=\"(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", file.read_text()), file


def test_what_is_broken_ends_the_build(tmp_path: Path) -> None:
    """Links to no page and to no heading, and a page that nothing leads to. (With `--quiet` nothing would warn.)"""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("mkdocs.yml", *documentation.TOP):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    planted = {
        "docs/faq.md": "[gone](nowhere.md) and [gone](matrix.md#lmcache-9.9)",
        "README.md": "[gone](docs/nothing.md)",
        "docs/alone.md": "# Not in the navigation",
    }
    for page, text in planted.items():
        with (tmp_path / page).open("a") as file:
            file.write(f"\n{text}\n")
    done = build(tmp_path, tmp_path / "site")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert all(word in output for word in ("nowhere.md", "lmcache-9.9", "nothing.md", "alone.md", "4 warnings")), output


PAIRS = scenario_matrix.load((ROOT / "docs/matrix.json").read_text())


def test_the_matrix_is_what_the_lab_ran() -> None:
    page = support_matrix.page(PAIRS)
    assert all(played["date"] in page and played["python"] in page for played in PAIRS.values())
    assert all(f"## LMCache {lmcache} " in page and f"vLLM {vllm} |" in page for vllm, lmcache in PAIRS)
    section = page.partition("## LMCache 0.3.10 ")[2].partition("\n## ")[0]
    row = next(line for line in section.splitlines() if "KVF001" in line)
    assert row.count(support_matrix.FIXED) == len({vllm for vllm, _ in PAIRS})
    after = page.partition("## LMCache 0.3.10.post1 ")[2].partition("\n## ")[0]
    assert "KVF001" not in after
    assert "KVF002" in after


def test_the_matrix_shows_bugs_that_are_not_fixed_and_pairs_that_could_not_be_played() -> None:
    pairs = {pair: {**played, "outcomes": [dict(row) for row in played["outcomes"]]} for pair, played in PAIRS.items()}
    pair = ("0.32.0", "0.3.10")
    for row in pairs[pair]["outcomes"]:
        if row["scenario"] == "mismatch-in-tokens-to-load":
            row["fixed"] = "violated"
    pairs["0.32.0", "0.5.6"] = {"date": "2026-01-01", "python": "3.11", "code": "x", "why": "ImportError: no"}
    page = support_matrix.page(pairs)
    lines = page.splitlines()
    head, line = (next(line for line in lines if line.startswith(start)) for start in ("| LMCache", "| [0.3.10]"))
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert [vllm for vllm, cell in cells.items() if cell.endswith(" fixed, **1 not**")] == ["0.32.0"]
    assert support_matrix.NOT_FIXED in page.partition("## LMCache 0.3.10 ")[2].partition("\n## ")[0]
    assert support_matrix.NOT_FIXED in support_matrix.of_fix(pairs, "KVF001")
    assert "could not be played |" in next(line for line in page.splitlines() if line.startswith("| [0.5.6]"))


def test_of_a_fix_the_matrix_has_every_pair() -> None:
    text = support_matrix.of_fix(PAIRS, "KVF001")
    head, _, *rows = text.partition("\n\n")[0].splitlines()
    assert [cell.strip() for cell in head.split("|")[2:-1]] == [
        "0.3.9 to 0.3.9.post2",
        "0.3.10",
        "0.3.10.post1 to 0.5.6",
    ]
    assert len(rows) == len({vllm for vllm, _ in PAIRS})
    assert "does not play it" in support_matrix.of_fix(PAIRS, "KVF902")


def test_releases_are_listed_as_runs() -> None:
    known = ["0.3.9", "0.3.10", "0.3.11", "0.4.1"]
    assert span(known, known) == "0.3.9 to 0.4.1"
    assert span(["0.3.9", "0.3.11", "0.4.1"], known) == "0.3.9, 0.3.11 to 0.4.1"


def test_messages_lead_to_their_findings_and_fixes() -> None:
    by_text = {entry.text: entry for entry in error_index.entries()}
    crash = next(entry for text, entry in by_text.items() if "Mismatch in tokens to load" in text)
    assert (crash.findings, crash.fixes) == (("KVD101", "KVD102"), ("KVF001", "KVF003"))
    spec = next(entry for text, entry in by_text.items() if "was not given a load spec" in text)
    assert spec.findings == ("KVD104",)
    resumed = next(entry for text, entry in by_text.items() if "Preempted request" in text)
    assert resumed.findings == ("KVD103", "KVD105", "KVD106", "KVD107")
    server = next(entry for text, entry in by_text.items() if "Cannot reach the LMCache MP server" in text)
    assert server.findings == ("KVD116",)
    stall = next(entry for text, entry in by_text.items() if "Timeout occurred for rank" in text)
    assert (stall.findings, stall.fixes) == (("KVD203",), ("KVF015",))


def test_no_message_is_left_without_an_answer() -> None:
    assert all(entry.findings or entry.fixes for entry in error_index.entries())
    found = {code for entry in error_index.entries() for code in entry.findings}
    # By counts over the whole log, or by numbers in lines that every log has; the unknown exception has no text.
    without = [rule for rule in findings.catalogue() if rule.code not in found]
    # KVD117 has the assertion of KVD112, in another worker. KVD212 is of errors that the grammar does not read, KVD213
    # and KVD1303 of stacks, KVD1057 of what uvicorn says of any request.
    others = [rule.code for rule in without if not {"", "asked", "stats", "retrieved"} >= set(rule.on)]
    assert sorted(others) == ["KVD1057", "KVD117", "KVD1303", "KVD212", "KVD213"]
    page = error_index.page()
    assert all(f"findings/{code.lower()}.md" in page for code in found)


def test_what_can_be_abused_is_named_where_reports_go() -> None:
    """SECURITY.md names the fixes whose patch goes to vLLM in private first."""
    private = {each.code for each in catalogue.fixes() if any("SECURITY.md" in why for why in each.no_patch.values())}
    _, _, listed = (ROOT / "SECURITY.md").read_text().partition("neither a patch in")
    assert set(re.findall(r"KVF\d+", listed)) == private


def test_the_picture_is_of_the_present_program() -> None:
    log = ROOT / "tests/diagnose/logs/crash-0.3.10.log.gz"
    made = picture(gzip.decompress(log.read_bytes()))
    assert "KVD101" in made
    assert "KVF001" in made
    assert made == (ROOT / "docs/diagnose.svg").read_text(), "make it anew: maintain/documentation/diagnose_picture.py"
