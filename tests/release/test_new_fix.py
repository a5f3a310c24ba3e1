"""A new fix needs two files, one for the fix and one for a scenario. All commands and pages find both files."""

import json
import shutil
import sys
from pathlib import Path

from tests.conftest import ROOT, Fresh, release

FIX = '''"""A hit is promised twice.

Symptom: `Planted in a test`.

Cause: None.

Fix: None.

- Releases: LMCache 0.3.10.
- Remove when: Never.
"""

from kvfix.fixes.api import LMCACHE_V1, Fix, after


def fix(adapter):
    return after(lambda impl, answer, *_: answer)


FIX = Fix(
    LMCACHE_V1.get_num_new_matched_tokens(broken=">=0.3.10", fix=fix, order=99),
    effect="crash",
    evidence={"KVR010": "", "KVD101": "", "KVR011": "Planted"},
    scenarios=("planted-scenario",),
    no_patch={"lmcache": "it is planted"},
)
'''
SCENARIO = '''"""A planted one."""

from kvfix_tools.lab.scenario import Scenario
from kvfix_tools.lab.steps import admit, prompt, run

SCENARIOS = {
    "planted-scenario": Scenario(
        doc="A planted one.", schedule=[admit("r", prompt(8)), run()], shows="LAB004", wrong={"lmcache": ">=0.3.10"}
    )
}
'''
ASK = """
from kvfix import catalogue
from kvfix.ledger import Finding
from kvfix_tools import explain, upstream
from kvfix_tools.diagnose import problems
from maintain import scenario_matrix
from maintain.documentation import code_pages
import contextlib, io, kvfix

facts = {{each.code: each.facts for each in explain.entries()}}
with contextlib.redirect_stdout(io.StringIO()) as listed:
    upstream.show()
finding = Finding("KVR011", "exception-left-hook", "violated", "r", "Planted", None)
result = {{
    "status": [row.verdict for row in kvfix.status() if row.code == "KVF099"],
    "report": [row.code for row in catalogue.rows_handling(finding)],
    "explain": facts["KVF099"],
    "explain rule": facts["KVR010"],
    "explain lab rule": facts["LAB004"],
    "diagnose": next(rule for rule in problems.catalogue() if rule.code == "KVD101").fixes,
    "upstream": listed.getvalue(),
    "page": code_pages.of_fix(catalogue.find("KVF099"), scenario_matrix.load(open({matrix!r}).read())),
}}
"""


def test_every_list_knows_a_new_fix(tmp_path: Path, fresh: Fresh) -> None:
    for folder in ("patches/kvfix", "tools/kvfix_tools", "tools/maintain"):
        shutil.copytree(ROOT / folder, tmp_path / Path(folder).name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kvfix/fixes/lmcache/kvf099_planted_fix.py").write_text(FIX)
    (tmp_path / "kvfix_tools/lab/scenarios/planted_scenario.py").write_text(SCENARIO)
    path = f"{tmp_path}:{release('0.3.10')}"
    found = fresh(ASK.format(matrix=str(ROOT / "docs/matrix.json")), PYTHONPATH=path)
    assert found["status"] == ["applicable"]
    assert found["report"] == ["KVF099"]
    assert found["explain"]["slug"] == "planted-fix"
    assert "KVF099" in found["explain rule"]["fixes"]
    assert "KVF099" in found["explain lab rule"]["fixes"]
    assert found["diagnose"] == ["KVF001", "KVF099"]
    assert "no patch of KVF099 for lmcache: it is planted" in found["upstream"]
    assert "none for LMCache: it is planted" in found["page"]
    assert "planted-scenario" in found["page"]
    listed = fresh.run([sys.executable, "-m", "kvfix_tools.cli", "lab", "list", "--json"], PYTHONPATH=path)
    rows = {row["slug"]: row["fixes"] for row in json.loads(listed.stdout)}
    assert rows["planted-scenario"] == ["KVF099"]
