"""Names of the lab whose modules import vLLM. A fork imports a module at the first use. pytest itself imports none."""

from importlib import import_module
from typing import Any

_MODULES = {
    "EngineDied": "engine.lab_engine", "LabEngine": "engine.lab_engine", "Pair": "pair.pair", "play": "fuzz.fuzz",
    "move": "fuzz.fuzz", "Run": "fuzz.fuzz_run", "fuzz": "fuzz.fuzz_run",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(import_module(f"kvfix_tools.lab.{_MODULES[name]}"), name)
