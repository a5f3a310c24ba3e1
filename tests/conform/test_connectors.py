"""docs/connectors.json has the verdicts of `kvfix conform` on vLLM's connectors. A test plays one connector again."""

from pathlib import Path
from typing import Any
from unittest import mock

from kvfix_tools.conform import contract
from maintain import connectors
from tests.conform.test_conform import LMCACHE
from tests.conftest import ROOT, Once


def example() -> Any:
    (wanted,) = (each for each in connectors.SUBJECTS if each.name == "ExampleConnector")
    with mock.patch.object(connectors, "SEEDS", 0):
        return connectors.ask(wanted).verdicts


def test_each_connector_that_vllm_ships_is_in_the_table() -> None:
    factory = "vllm/distributed/kv_transfer/kv_connector/factory.py"
    (source,) = ROOT.glob(f".venv/lib/python*/site-packages/{factory}")
    shipped = set()
    for part in source.read_text().split("KVConnectorFactory.register_connector(")[1:]:
        shipped.add(part.split('"')[1])
    named = {each.name.partition("[")[0] for each in connectors.SUBJECTS}
    assert shipped - named <= {"NixlConnector"}  # alias of NixlPullConnector
    assert [each.name for each in connectors.load()] == [each.name for each in connectors.SUBJECTS]


def test_each_has_a_verdict_for_each_rule() -> None:
    for said in connectors.load():
        assert list(said.verdicts) == [rule.slug for rule in contract.RULES], said.name
        assert said.cannot or said.loaded, said.name


def test_the_table_is_what_comes_of_it(once: Once) -> None:
    again = once(example, LMCACHE)
    (said,) = (each for each in connectors.load() if each.name == "ExampleConnector")
    broken = {rule for rule, outcome in again.items() if outcome == "violated"}
    assert broken == {"promise", "stored", "reset", "raises-nothing"}
    # the fuzzer has found more
    assert broken <= {rule for rule, outcome in said.verdicts.items() if outcome == "violated"}


def test_the_file_has_no_path_of_a_machine() -> None:
    text = Path(connectors.FILE).read_text()
    assert "/tmp" not in text
    assert "site-packages" not in text
