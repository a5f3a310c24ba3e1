"""Write docs/connectors.json by `kvfix conform` on vLLM's connectors: python -m maintain connectors [NAME...]"""

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

SEEDS, LIMIT = 20, 900  # seeds of the fuzzer, and maximum seconds for a connector
FILE = Path(__file__).parents[2] / "docs/connectors.json"
_FOLDER = {"shared_storage_path": "{dir}"}
_EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": _FOLDER}
#: Connectors that run without a configuration.
_PLAIN = (
    "LMCacheConnectorV1", "LMCacheMPConnector", "OffloadingConnector", "SimpleCPUOffloadConnector",
    "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector",
    "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector",
)  # fmt: skip


class Subject(NamedTuple):
    """name: in the table. connector: for the command. note: explains the verdicts."""

    name: str
    connector: str
    config: dict[str, Any] = {}
    note: str = ""


SUBJECTS = (
    Subject("ExampleConnector", "ExampleConnector", _FOLDER),
    Subject("MultiConnector[ExampleConnector]", "MultiConnector", {"connectors": [_EXAMPLE]}),
    Subject("DecodeBenchConnector", "DecodeBenchConnector", note="loads made-up KV on purpose, for benchmarks."),
    *(Subject(name, name) for name in _PLAIN),
    Subject("ExampleHiddenStatesConnector", "ExampleHiddenStatesConnector", _FOLDER),
)


class Said(NamedTuple):
    """The result of one connector. verdicts: by rule. loaded: tokens. cannot: why it could not be run."""

    name: str
    verdicts: dict[str, str]
    loaded: int
    cannot: str
    stand_in: str = ""

    @property
    def note(self) -> str:
        own = next((subject.note for subject in SUBJECTS if subject.name == self.name), "")
        side = f"played through the lab's own side of it: {self.stand_in} ([the lab](lab.md))." if self.stand_in else ""
        return own or side


def load() -> list[Said]:
    return [Said(**each) for each in json.loads(FILE.read_text())["connectors"]]


def version() -> str:
    return str(json.loads(FILE.read_text())["vllm"])


def ask(subject: Subject) -> Said:
    from kvfix_tools.conform import player

    with command.chosen(fixes=True):
        done = verdicts.run(player.Subject(subject.connector, subject.config), math.inf, range(SEEDS), shrinking=0)
    outcomes = {each.rule: each.outcome for each in done.verdicts}
    return Said(subject.name, outcomes, done.counts.get("loaded_tokens", 0), done.cannot, done.stand_in)


def main(names: Annotated[Names, typer.Argument()] = None) -> None:
    command.prepare()
    from kvfix_tools.conform.player import Subject as Played

    _ = Played("ExampleConnector").lacks  # let vLLM inspect its models here, so that no process has to
    known = {each.name: each for each in load()} if FILE.exists() else {}
    for subject in SUBJECTS:
        if not names or subject.name in names:
            print(subject.name, file=sys.stderr)
            with get_context("fork").Pool(1) as pool:
                known[subject.name] = pool.apply_async(ask, [subject]).get(LIMIT)
            said = [known[subject.name]._asdict() for subject in SUBJECTS if subject.name in known]
            whole = {"vllm": installed_source.version("vllm"), "connectors": said}
            FILE.write_text(json.dumps(whole, indent=1) + "\n")
