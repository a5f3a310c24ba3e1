"""`make quick` skips only tests in quick.LEFT_OUT and tests that import torch or start a program that imports torch."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, clean_environment

CASES = """
import subprocess, sys
import pytest
from tests.conftest import Fresh, clean_environment

def test_plain():
    assert Fresh()("result = 1") == 1

def test_fails():
    raise ValueError

def test_imports():
    import torch

def test_imports_and_says_nothing():
    try:
        import torch
    except Exception:
        pass

def test_program():
    Fresh()("import torch; result = 1")

def test_program_of_its_own():
    subprocess.run([sys.executable, "-c", "import torch"], env=clean_environment(), check=True)

@pytest.fixture(scope="module")
def answer():
    return Fresh()("import torch; result = 1")

@pytest.mark.parametrize("number", [1, 2])
def test_fixture(answer, number):
    pass
"""


def test_it_leaves_out_what_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_module.py").write_text("import torch\n\ndef test_never(): raise ValueError\n")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/test_engine.py").write_text("def test_never(): raise ValueError\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.quick", "-p", "no:cacheprovider", "--quick", str(tmp_path)],
        cwd=tmp_path, env=clean_environment(ROOT), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed, 7 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_fails" in done.stdout
    assert "quick: left out 7 tests" in done.stdout
