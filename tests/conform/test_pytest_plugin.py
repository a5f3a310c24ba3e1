"""`pytest --kv-connector` runs the kit as tests, in a separate pytest."""

import sys
from pathlib import Path

from tests.conftest import Fresh, run_forked

OWN = ["-q", "-rs", "-p", "no:cacheprovider", "-c"]


def test_scenarios_are_tests(tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    connector = ["--kv-connector", "tests.conform.broken:ResetsNothing", "--kv-config", '{"folder": "{dir}"}']
    chosen = "whole-prompt or reset-of-the-connector or sliding-window"
    command = [sys.executable, "-m", "pytest", *OWN, str(settings), *connector, "--kv-seconds", "0", "-k", chosen]
    done = run_forked([*command, str(tmp_path)], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 2 skipped" in done.stdout
    assert "reset: LAB001" in done.stdout
    assert "new_weights()" in done.stdout
    assert "does not have SupportsHMA" in done.stdout


def test_without_the_option_nothing_is_imported(tmp_path: Path, fresh: Fresh) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\ndef test_it():\n"
        "    assert 'kvfix_tools.conform.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'vllm', 'rich', 'typer', 'kvfix'} & set(sys.modules)\n"
    )
    done = fresh.run([sys.executable, "-m", "pytest", *OWN, str(tmp_path / "pytest.ini"), str(tmp_path)])
    assert "1 passed" in done.stdout, done.stdout + done.stderr
