"""`kvfix status --released` lists fixes whose wrapped functions have changed. pip finds the releases in a folder."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvfix import applicability, catalogue
from kvfix_tools.status_released import _file
from tests.conftest import RELEASES, Fresh
from tests.diagnose.lines import vllm_releases

RELEASED = [sys.executable, "-m", "kvfix_tools.cli", "status", "--released"]
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
ADAPTER = "lmcache/integration/vllm/vllm_v1_adapter.py"


def root(dist: str) -> Path:
    if dist == "lmcache":
        return RELEASES / "0.5.6"
    newest = applicability.fingerprints()[dist]["releases"][-1]
    if newest not in vllm_releases():
        pytest.skip(f"vLLM {newest} is not in .cache/vllm: `requirements/matrix` fetches it")
    return vllm_releases()[newest]


def publish(index: Path, dist: str, version: str, changes: dict[str, str | None] | None = None) -> None:
    """Write into `index` a wheel with the files that fixes patch. changes: {file: new text, or None to omit it}."""
    names = {_file(target) for fix in catalogue.fixes() for target in fix.targets if target.dist == dist}
    texts = {name: (root(dist) / name).read_text() for name in sorted(names) if (root(dist) / name).is_file()}
    texts = {name: text for name, text in {**texts, **(changes or {})}.items() if text is not None}
    info = f"{dist}-{version}.dist-info"
    texts[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
    texts[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in texts)
    with zipfile.ZipFile(index / f"{dist}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    for dist, version in {"lmcache": "0.5.6", "vllm": "0.33.0"}.items():
        publish(tmp_path, dist, version)
    return tmp_path


def ask(fresh: Fresh, index: Path, code: int, *more: str) -> subprocess.CompletedProcess[str]:
    done = fresh.run([*RELEASED, *more], PIP_CONFIG_FILE="/dev/null", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert done.returncode == code, done.stdout + done.stderr
    return done


def rows_of(fresh: Fresh, index: Path, code: int) -> Any:
    return json.loads(ask(fresh, index, code, "--json").stdout)


def test_nothing_has_changed(fresh: Fresh, index: Path) -> None:
    rows = rows_of(fresh, index, 0)
    assert {row["change"] for row in rows} == {"unchanged"}
    assert {(row["dist"], row["version"]) for row in rows} == {("lmcache", "0.5.6"), ("vllm", "0.33.0")}
    verdicts = {row["code"]: row["verdict"] for row in rows}
    assert verdicts["KVF001"] == "fixed-upstream"
    assert verdicts["KVF003"] == "applicable"
    assert verdicts["KVF201"] == "applicable"
    assert set(verdicts) == {each.code for each in catalogue.fixes()}


def test_what_has_changed_is_listed(fresh: Fresh, index: Path) -> None:
    text = (root("lmcache") / ADAPTER).read_text()
    hook = "def get_num_new_matched_tokens("
    assert text.count(hook) == 1
    changed = text.replace(hook, f"@new\n    {hook}")
    gone = next(_file(target) for fix in catalogue.fixes() for target in fix.targets if fix.code == "KVF016")
    publish(index, "lmcache", "0.5.7", {ADAPTER: changed, gone: None})
    publish(index, "lmcache", "0.6.0rc1", {ADAPTER: None})  # a release candidate does not count as the newest release
    publish(index, "vllm", "0.34.0", {SCHEDULER: "this is no Python"})
    rows = rows_of(fresh, index, 1)
    assert {(row["dist"], row["version"]) for row in rows} == {("lmcache", "0.5.7"), ("vllm", "0.34.0")}
    found = {row["code"]: (row["change"], row["verdict"], row["reason"]) for row in rows}
    assert found["KVF003"][:2] == ("changed", "unknown")
    assert "know this version of LMCacheConnectorV1Impl.get_num_new_matched_tokens" in found["KVF003"][2]
    assert found["KVF016"][:2] == ("unknown", "refused")
    assert "does not have" in found["KVF016"][2]
    assert found["KVF201"][0] == "unknown"
    assert "cannot be read as Python" in found["KVF201"][2]
    assert found["KVF005"][:2] == ("unchanged", "applicable")
    text = ask(fresh, index, 1).stdout
    assert "newest lmcache: 0.5.7 (kvfix knows up to 0.5.6)" in text
    assert "KVF003" in text
    assert "KVF005" not in text


def test_an_older_release_is_put_back(fresh: Fresh, index: Path) -> None:
    """The newest release has code of an older release that kvfix knows. kvfix recognizes this code."""
    publish(index, "lmcache", "0.5.7", {ADAPTER: (RELEASES / "0.3.10" / ADAPTER).read_text()})
    row = next(row for row in rows_of(fresh, index, 1) if row["code"] == "KVF001")
    assert (row["change"], row["verdict"]) == ("changed", "applicable")
    assert "0.3.10" in row["reason"]


def test_a_missing_index_is_reported(fresh: Fresh, tmp_path: Path) -> None:
    done = ask(fresh, tmp_path / "nowhere", 77, "--json")
    assert done.stdout == ""
    assert "pip could not fetch lmcache" in done.stderr
    assert "Traceback" not in done.stderr
