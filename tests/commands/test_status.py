"""`kvfix status` as a table: what needs action first, the rest as a count. On released code: tests/runtime."""

from __future__ import annotations

import json
import sys

import pytest

from kvfix import fix_status
from kvfix_tools import status
from tests.conftest import RELEASES, Fresh

VERDICTS = ["not-affected", "applied", "fixed-upstream", "applicable", "unknown", "not-installed", "failed"]
ROWS = [
    fix_status.FixRow(f"KVF{number:03}", "slug", "lmcache", "0.5.6", verdict, "reason")
    for number, verdict in enumerate([*VERDICTS, "applicable"])
]


def codes(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines() if line.startswith("KVF0")]


def test_what_needs_action_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Failed, unknown, applicable, in the order of their codes; then applied."""
    status._print_rows(ROWS, everything=False)
    output = capsys.readouterr().out
    assert codes(output) == ["KVF006", "KVF004", "KVF003", "KVF007", "KVF001"]
    assert "\nand 1 fixed-upstream, 1 not-affected, 1 not-installed (kvfix status --all lists them)\n" in output
    assert "kvfix explain CODE" in output
    assert "kvfix run -- CMD" in output


def test_all_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    status._print_rows(ROWS, everything=True)
    output = capsys.readouterr().out
    assert codes(output) == ["KVF006", "KVF004", "KVF003", "KVF007", "KVF001", "KVF002", "KVF000", "KVF005"]
    assert "--all" not in output


def test_where_nothing_needs_action_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status._print_rows([ROWS[0], ROWS[2]], everything=False)
    assert capsys.readouterr().out == "1 fixed-upstream, 1 not-affected (kvfix status --all lists them)\n"


def test_json_has_every_row_in_the_order_of_codes(fresh: Fresh) -> None:
    def status(*options: str) -> list[dict[str, str]]:
        lines = ["import sys", f"sys.path.insert(0, {str(RELEASES / '0.3.10')!r})", f"sys.argv[1:] = {options!r}"]
        code = "; ".join([*lines, "from kvfix_tools.cli import main", "main()"])
        return list(json.loads(fresh.run([sys.executable, "-c", code]).stdout))

    rows = status("status", "--json")
    assert rows == status("status", "--json", "--all")
    assert [row["code"] for row in rows] == sorted(row["code"] for row in rows)
    assert {"applicable", "not-affected"} <= {row["verdict"] for row in rows}


@pytest.mark.parametrize("option", ["--all", "--probe"])
def test_released_is_not_about_the_installation(option: str, fresh: Fresh) -> None:
    done = fresh.run([sys.executable, "-m", "kvfix_tools.cli", "status", "--released", option])
    assert done.returncode == 2
