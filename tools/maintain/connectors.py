"""docs/connectors.json: what `kvfix conform` says of each connector that vLLM ships, each in a process of its own.

python -m maintain.connectors [NAME...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "docs/connectors.json"
_EXAMPLE = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "{dir}"},
}


class Subject(NamedTuple):
    """name: as the table has it. connector: for the command. note: what a reader must know of the verdicts."""

    name: str
    connector: str
    config: dict[str, Any] = {}
    note: str = ""


_BYTES = {"cpu_bytes_to_use": 1 << 22}
_SIDE = "played through the lab's own side of it: its cache engine or server is the lab's ([the lab](lab.md))."
SUBJECTS = (
    Subject("ExampleConnector", "ExampleConnector", {"shared_storage_path": "{dir}"}),
    Subject("MultiConnector[ExampleConnector]", "MultiConnector", {"connectors": [_EXAMPLE]}),
    Subject("DecodeBenchConnector", "DecodeBenchConnector", note="loads made-up KV on purpose, for benchmarks."),
    Subject("LMCacheConnectorV1", "v1", note=_SIDE),
    Subject("LMCacheMPConnector", "mp", note=_SIDE),
    Subject("OffloadingConnector", "OffloadingConnector", _BYTES),
    Subject("SimpleCPUOffloadConnector", "SimpleCPUOffloadConnector", _BYTES),
    Subject("NixlPullConnector", "NixlPullConnector"),
    Subject("NixlPushConnector", "NixlPushConnector"),
    Subject("MooncakeConnector", "MooncakeConnector"),
    Subject("MooncakeStoreConnector", "MooncakeStoreConnector"),
    Subject("MoRIIOConnector", "MoRIIOConnector"),
    Subject("FlexKVConnectorV1", "FlexKVConnectorV1"),
    Subject("HF3FSKVConnector", "HF3FSKVConnector"),
    Subject("HiSparseConnector", "HiSparseConnector"),
    Subject("ExampleHiddenStatesConnector", "ExampleHiddenStatesConnector", {"shared_storage_path": "{dir}"}),
)


class Said(NamedTuple):
    """Of one connector. verdicts: by rule. loaded: tokens. cannot: why it could not be run."""

    name: str
    verdicts: dict[str, str]
    loaded: int
    cannot: str

    @property
    def note(self) -> str:
        return next((subject.note for subject in SUBJECTS if subject.name == self.name), "")


def load() -> list[Said]:
    return [Said(**each) for each in json.loads(FILE.read_text())["connectors"]]


def version() -> str:
    """The vLLM of the table."""
    return str(json.loads(FILE.read_text())["vllm"])


def ask(subject: Subject) -> Said:
    """Play it. Raises RuntimeError if the command says nothing."""
    command = [sys.executable, "-m", "kvfix_tools.cli", "conform", subject.connector, "--json", "--seconds", "20"]
    done = subprocess.run(
        [*command, "--config", json.dumps(subject.config)], capture_output=True, text=True, check=False, timeout=600
    )
    if not done.stdout:
        raise RuntimeError(done.stderr)
    answer = json.loads(done.stdout)
    verdicts = {each["rule"]: each["outcome"] for each in answer["verdicts"]}
    return Said(subject.name, verdicts, answer["counts"].get("loaded_tokens", 0), answer["cannot"])


def main(names: list[str]) -> None:
    from kvfix import installed_source

    known = {each.name: each for each in load()} if FILE.exists() else {}
    for subject in SUBJECTS:
        if not names or subject.name in names:
            print(subject.name, file=sys.stderr)
            known[subject.name] = ask(subject)
    said = [known[subject.name]._asdict() for subject in SUBJECTS if subject.name in known]
    FILE.write_text(json.dumps({"vllm": installed_source.version("vllm"), "connectors": said}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
