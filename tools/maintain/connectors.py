"""Run `kvfix conform` on vLLM's connectors, and write docs/connectors.json: python -m maintain connectors [NAME...]"""

import json
import math
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvfix import installed_source
from kvfix_tools.command_options import Names
from kvfix_tools.conform import command, verdicts

SEEDS, LIMIT = 20, 900  # for each connector: number of the fuzzer's schedules, and maximum seconds
FILE = Path(__file__).parents[2] / "docs/connectors.json"
_FOLDER = {"shared_storage_path": "{dir}"}
_EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": _FOLDER}
#: Connectors that run without a configuration.
_PLAIN = (
    "LMCacheConnectorV1", "LMCacheMPConnector", "OffloadingConnector", "SimpleCPUOffloadConnector",
    "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector",
    "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector",
)  # fmt: skip
#: {name of the connector, with the names of its children in brackets: configuration}
SUBJECTS: dict[str, dict[str, Any]] = {
    "ExampleConnector": _FOLDER,
    "MultiConnector[ExampleConnector]": {"connectors": [_EXAMPLE]},
    **{name: {} for name in ("DecodeBenchConnector", *_PLAIN)},
    "ExampleHiddenStatesConnector": _FOLDER,
}


class Said(NamedTuple):
    """The result for a connector. verdicts: {rule: verdict}. loaded: tokens. cannot: why the connector cannot run."""

    name: str
    verdicts: dict[str, str]
    loaded: int
    cannot: str
    stand_in: str = ""

    @property
    def note(self) -> str:
        if self.name == "DecodeBenchConnector":
            return "loads made-up KV on purpose, for benchmarks."
        return f"the lab replaced a part for this test: {self.stand_in} ([the lab](lab.md))." if self.stand_in else ""


def load() -> list[Said]:
    return [Said(**each) for each in json.loads(FILE.read_text())["connectors"]]


def version() -> str:
    return str(json.loads(FILE.read_text())["vllm"])


def ask(name: str) -> Said:
    from kvfix_tools.conform.player import Subject

    with command.chosen(fixes=True):
        subject = Subject(name.partition("[")[0], SUBJECTS[name])
        done = verdicts.run(subject, math.inf, range(SEEDS), shrinking=0)
    outcomes = {each.rule: each.outcome for each in done.verdicts}
    return Said(name, outcomes, done.counts.get("loaded_tokens", 0), done.cannot, done.stand_in)


def main(names: Annotated[Names, typer.Argument()] = None) -> None:
    command.prepare()
    from kvfix_tools.conform.player import Subject

    _ = Subject("ExampleConnector").lacks  # vLLM inspects its models here once, and not in each forked process
    known = {each.name: each for each in load()} if FILE.exists() else {}
    for name in SUBJECTS:
        if not names or name in names:
            print(name, file=sys.stderr)
            with get_context("fork").Pool(1) as pool:
                known[name] = pool.apply_async(ask, [name]).get(LIMIT)
            said = [known[each]._asdict() for each in SUBJECTS if each in known]
            FILE.write_text(json.dumps({"vllm": installed_source.version("vllm"), "connectors": said}, indent=1) + "\n")
