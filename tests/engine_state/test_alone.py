"""The modules of `engine_state` are brought into processes that have no kvfix."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvfix.engine_state
from tests.conftest import clean_environment

FILES = sorted(Path(kvfix.engine_state.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_imports_the_standard_library_and_itself_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module in ("__future__", "types", "typing", "collections.abc")
        if isinstance(node, ast.Import):
            assert {each.name for each in node.names} <= {"os", "sys", "time", "threading"}


def test_a_process_without_vllm() -> None:
    code = "import json; from kvfix import engine_state as e; print(json.dumps(e.collect()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True, timeout=60
    )
    state = json.loads(done.stdout)
    assert (state["scheduler"], state["connectors"], state["unread"], state["hook"]) == (None, [], {}, "")
