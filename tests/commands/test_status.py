import json
import re
import sys

import pytest

from kvfix import catalogue
from kvfix.fixes.record import EFFECTS
from kvfix_tools import fix_overview, status
from tests.conftest import RELEASES, Fresh

FIXES = catalogue.fixes()


def rows(*verdicts: str) -> list[catalogue.FixRow]:
    return [
        catalogue.FixRow(fix.code, fix.slug, dist, "1.0", verdicts[number % len(verdicts)], "has the code of 1.0")
        for number, fix in enumerate(FIXES)
        for dist in fix.dists
    ]


def overview(*verdicts: str, connector: str = "") -> list[str]:
    return status.overview(status._select(rows(*verdicts), (), connector, "", ""))


@pytest.mark.parametrize("connector", ["", *fix_overview.KNOWN])
@pytest.mark.parametrize("verdicts", [("applicable",), ("refused",), ("opt-in", "applicable", "unfixable", "applied")])
def test_it_fits_one_screen(connector: str, verdicts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfix.installed_source.version", {"vllm": "0.32.0", "lmcache": "0.5.6"}.__getitem__)
    lines = overview(*verdicts, connector=connector)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("SUMMARY: ")


def test_the_counts_are_those_of_the_fixes() -> None:
    """A bug in two distributions counts once. A bug of another connector does not count."""
    lines = overview("applicable", connector="NixlConnector")
    mine = [fix for fix in FIXES if not fix_overview.connectors(fix) or "NixlConnector" in fix_overview.connectors(fix)]
    assert lines[-1] == f"SUMMARY: {len(mine)} to be fixed by kvfix.apply()"
    (counted,) = (line.split() for line in lines if line.startswith("  these connectors"))
    assert counted[2:] == [str(sum(fix.effect == effect for fix in mine)) for effect in EFFECTS]
    assert 0 < len(mine) < len(FIXES)


def test_what_is_not_fixed_is_named_and_the_rest_is_counted() -> None:
    lines = overview("refused")
    named = [line for line in lines if line.startswith("  refused")]
    (rest,) = (line for line in lines if "more: kvfix status --all" in line)
    assert len(named) + int(rest.split()[1]) == len(FIXES)
    assert lines[-1] == f"SUMMARY: {len(FIXES)} refused"
    lines = overview("not-affected", "fixed-upstream")
    assert "No known bug of these releases is left for kvfix.apply() to fix." in lines
    assert lines[-1] == "SUMMARY: no known bug"


def test_the_rows_of_named_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["kvf017", "lookup-cache-ignores-computed"]
    status._print_rows(status._select(rows("opt-in"), names, "", "", ""), everything=True)
    printed = capsys.readouterr().out
    assert re.findall(r"^(KVF\d+) opt-in", printed, re.MULTILINE) == ["KVF017", "KVF001"]  # the worst effect first
    assert 'kvfix.apply(plus=["KVF017"])' in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_rows_of_one_severity(capsys: pytest.CaptureFixture[str]) -> None:
    status._print_rows(status._select(rows("applicable"), (), "", "wrong-output", ""), everything=False)
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("KVF")]
    assert heads
    assert all("(wrong output; " in line for line in heads)


TRANSFER = '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [%s]}}'


@pytest.mark.parametrize(
    ("named", "config", "environment", "expected"),
    [
        ("NixlConnector", "", "", ({"NixlConnector"}, "--connector")),
        ("", '{"kv_connector": "NixlPushConnector"}', "", ({"NixlConnector"}, "--kv-transfer-config")),
        ("", TRANSFER % '{"kv_connector": "LMCacheConnectorV1"}, {"kv_connector": "OffloadingConnector"}', "",
         ({"MultiConnector", "LMCacheConnectorV1", "OffloadingConnector"}, "--kv-transfer-config")),
        ("", "", "LMCacheMPConnector", ({"LMCacheMPConnector"}, "KVFIX_CONNECTOR")),
        ("", "", "", (set(), "")),
    ],
)  # fmt: skip
def test_where_the_connector_is_named(named, config, environment, expected, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("KVFIX_CONNECTOR", environment)
    assert fix_overview.in_use(named, config) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["KVF0017"], "unknown fix 'KVF0017'. Did you mean KVF0"),
        (["lookup-cache-ignores"], "Did you mean lookup-cache-ignores-computed?"),
        (["--connector", "LMCacheConectorV1"], "Did you mean LMCacheConnectorV1?"),
        (["--connector", "x"], "kvfix has fixes for LMCacheConnectorV1"),
        (["--severity", "bad"], "known: wrong output, crash, hang, leak, lost hits"),
        (["--kv-transfer-config", "{"], 'is not JSON with a key "kv_connector"'),
        (["--released", "--all"], "--released takes no other option"),
        (["--released", "--probe"], "--released takes no other option"),
    ],
)
def test_a_name_that_is_not_known(options: list[str], message: str, fresh: Fresh) -> None:
    done = fresh.run([sys.executable, "-m", "kvfix_tools.cli", "status", *options])
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr) < 600


def test_json_has_every_row_in_the_order_of_codes(fresh: Fresh) -> None:
    def asked(*options: str) -> list[dict[str, str]]:
        lines = ["import sys", f"sys.path.insert(0, {str(RELEASES / '0.3.10')!r})", f"sys.argv[1:] = {options!r}"]
        done = fresh.run([sys.executable, "-c", "; ".join([*lines, "from kvfix_tools.cli import main", "main()"])])
        assert done.returncode == 1
        return list(json.loads(done.stdout))

    found = asked("status", "--json")
    assert found == asked("status", "--json", "--all")
    assert list(found[0]) == ["code", "slug", "dist", "version", "verdict", "reason"]
    assert [row["code"] for row in found] == sorted(row["code"] for row in found)
    assert {"applicable", "not-affected"} <= {row["verdict"] for row in found}
