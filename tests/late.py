"""Import a module of the lab only in the forked process that uses the module, because the module imports vLLM."""

from importlib import import_module
from typing import Any

_MODULES = {
    "EngineDied": "engine.lab_engine", "LabEngine": "engine.lab_engine", "STEP": "engine.lab_engine",
    "LOOKUP_TIMEOUT": "engine.request_events", "vllm_objects": "engine.vllm_objects", "Pair": "pair.pair",
    "Neighbours": "pair.pair", "pair_engine": "pair.pair_engine", "play": "fuzz.fuzz", "move": "fuzz.fuzz",
    "Run": "fuzz.fuzz_run", "fuzz": "fuzz.fuzz_run", "continue_state": "continue_state",
    "fuzz_run": "fuzz.fuzz_run", "nixl_real": "connectors.nixl_real", "mooncake_network": "connectors.mooncake_network",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    module = import_module(f"kvfix_tools.lab.{_MODULES[name]}")
    return getattr(module, name, module)
