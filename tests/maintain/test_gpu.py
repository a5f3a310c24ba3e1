import argparse
import csv
import json
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvfix_tools.roundtrip.cell_check import Result
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.mismatch import Mismatch
from kvfix_tools.roundtrip.run_report import RunReport
from maintain.gpu import bundle, roundtrips, stages
from maintain.gpu.stages import NOT_HERE, TIMED_OUT, Stage

FILES = {
    "large/__init__.py": "from large import kept\n",
    "large/kept.py": "VALUE = 7\n",
    "large/E=1,N=7168.json": "{}\n",
    "large/compiled.bin": "operations\n",
    "large/fa2.bin": "left out\n",
    "large-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: large\nVersion: 1.0\n",
    "large-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "large-1.0.dist-info/RECORD": "",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "large-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        for name, text in FILES.items():
            out.writestr(name, text)
    return path


def test_the_parts_of_a_wheel_are_one_package_again(wheel: Path, tmp_path: Path) -> None:
    parts = bundle.split(wheel, tmp_path, {"large/fa2.*": "a reason"}, {"large/compiled.*": "large_operations"})
    assert [part.name for part in parts] == [wheel.name, "large_operations-1.0-py3-none-any.whl"]
    for part in parts:
        with zipfile.ZipFile(part) as content:
            (record,) = [name for name in content.namelist() if name.endswith("/RECORD")]
            rows = list(csv.reader(content.read(record).decode().splitlines()))
            assert sorted(row[0] for row in rows) == sorted(content.namelist())
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, *map(str, parts)], check=True)
    code = "import large; from importlib.metadata import version as v; "
    code += "print(large.kept.VALUE, v('large'), v('large_operations'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=site, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["7", "1.0", "1.0"]
    assert sorted(path.name for path in (site / "large").glob("*.bin")) == ["compiled.bin"]
    with pytest.raises(ValueError, match=r"has no file that matches large/fa9\.\*"):
        bundle.split(wheel, tmp_path, {"large/fa9.*": "a reason"}, {})


def test_the_bundle_has_wheels_and_scripts(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = wheel.with_name("vllm_operations-1.0-py3-none-any.whl")
    operations.write_bytes(wheel.read_bytes())
    assert bundle.make(tmp_path / "bundle", [wheel, operations])["2"] == wheel.stat().st_size
    assert (tmp_path / "bundle/1/maintain/gpu/run.sh").is_file()
    assert [path.name for path in (tmp_path / "bundle/1").glob("*.whl")] == [wheel.name]
    monkeypatch.setattr(bundle, "LIMIT", 100)
    with pytest.raises(ValueError, match="folder 1 has"):
        bundle.make(tmp_path / "large", [wheel])


#: The program of a stage appends the stage's name to a file, prints a step, and exits with the name as exit code.
FAKE = """
import json, sys, threading
name = sys.argv[1]
with open({ran!r}, "a") as file:
    file.write(name + " ")
print(json.dumps({{"what": "a step", "figures": sys.argv[3]}}))
if name == "hang":
    threading.Event().wait()
print("no CUDA device", file=sys.stderr)
sys.exit(int(name))
"""


class Fakes:
    def __init__(self, folder: Path) -> None:
        self.out, self._ran = folder / "out", folder / "ran"
        (folder / "fake_stage.py").write_text(FAKE.format(ran=str(self._ran)))

    def run(self, *names: str, resume: bool = False) -> int:
        self._ran.write_text("")
        table = tuple(Stage(name, 60 if name != "hang" else 2, "fake_stage", (name,)) for name in names)
        return stages.main([str(self.out), *(["--resume"] if resume else [])], table)

    @property
    def ran(self) -> list[str]:
        return self._ran.read_text().split()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Fakes(tmp_path)


def test_the_next_stage_runs_after_any_result(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert fakes.run("77", "1", "3", "hang", "0") == 1
    exits = {each["stage"]: each["exit"] for each in json.loads((fakes.out / "results.json").read_text())}
    assert exits == {"77": NOT_HERE, "1": 1, "3": 3, "hang": TIMED_OUT, "0": 0}
    lines = [" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["77 not", "1 FAILED", "3 CRASHED", "hang TIMED", "0 passed"]
    rows = (fakes.out / "table.md").read_text().splitlines()
    assert rows[2].startswith("| 77 | not checked | no CUDA device |")
    assert rows[-1].startswith("| 0 | passed | a step: cuda |")
    assert len(rows) == 7


def test_resume_runs_what_has_no_result(fakes: Fakes) -> None:
    assert fakes.run("77") == NOT_HERE
    assert fakes.run("77", "1", "0", resume=True) == 1
    assert fakes.ran == ["77", "1", "0"]
    assert fakes.run("77", "1", "0", resume=True) == 1
    assert fakes.ran == ["77"]  # only this stage runs again, because its result was "not checked"
    assert fakes.run("0") == 0
    assert fakes.ran == ["0"]


def test_a_stage_without_gpu_ends_with_77(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0", cuda=cuda))
    with pytest.raises(SystemExit) as ended:
        stages.device(["torch", "--device", "cuda"])
    assert ended.value.code == NOT_HERE
    assert capsys.readouterr().err == "no CUDA device: torch 2.11.0 sees none\n"
    assert stages.device(["torch", "--device", "cpu"]) == ("torch", "cpu")
    cuda.is_available = lambda: True
    assert stages.device(["torch", "--device", "cuda"]) == ("torch", "cuda")


def report(*results: Result, speeds: tuple[Result, ...] = ()) -> RunReport:
    made = RunReport(torch.device("cpu"), argparse.Namespace(inject="stale"))
    made.results, made.speeds = list(results), list(speeds)
    return made


def result(verdict: str, kinds: tuple[str, ...] = (), layout: str = "nhd") -> Result:
    findings = [Mismatch("store, host", "", 0, Counter(kinds))] if kinds else []
    return Result(Cell("lmcache-v2", layout=layout), verdict, findings)


def large(**changes: Any) -> RunReport:
    """Return the report of a large transfer. Without `changes`, the transfer and its check are fast enough."""
    seconds = {"store": 0.7, "load": 0.7, "plain_store": 0.69, "plain_load": 0.69, "check_seconds": 2.0}
    return report(result("passed"), speeds=(replace(result("passed"), **{**seconds, **changes}),))


def engine(reason: str, loaded: int) -> RunReport:
    return report(replace(result("failed"), reason=reason, operations=f"576 were promised and {loaded} loaded"))


STALE, DIFFER = result("failed", ("stale",)), "warm: 3 of 3 outputs differ"
KNOWN = result("passed"), result("failed", layout="packed")  # LMCache issue 4463


@pytest.mark.parametrize(
    ("judge", "made", "right"),
    [
        (roundtrips.fast, large(), True),
        (roundtrips.fast, large(store=0.74), False),  # slower than a plain copy
        (roundtrips.fast, large(check_seconds=3.0), False),
        (roundtrips.fast, large(verdict="refused"), False),
        # A planted fault is found if every cell that is not refused names the fault.
        (roundtrips.found, report(STALE, result("failed", ("stale", "bit flip")), result("refused")), True),
        (roundtrips.found, report(STALE, result("failed", ("bit flip",))), False),
        (roundtrips.found, report(STALE, result("passed")), False),
        (roundtrips.found, report(result("refused")), False),
        # Without fixes, only cells of the known bug may fail, and the engine's answers must be wrong.
        (roundtrips.known, report(*KNOWN), True),
        (roundtrips.known, report(*KNOWN, result("crashed")), False),
        (roundtrips.differs, engine(DIFFER, 576), True),
        (roundtrips.differs, engine("", 576), False),
        (roundtrips.differs, engine(DIFFER, 0), False),
    ],
)
def test_the_judgement_of_a_report(judge: Any, made: RunReport, right: bool) -> None:
    assert judge(made) is right
