"""Define subclasses of LMCache's connectors that log the worker's loads to a file. backends/engine.py reads the file.

`kv_connector_module_path` names this module, so all vLLM processes import this module. On the CPU, the module replaces
CUDA by the stand-ins of the backend `lmcache-v2`. On the CPU, LMCache's GPU connector V2 can copy only whole blocks,
because vLLM orders the data inside a block differently than V2 expects.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import engine, lmcache


def with_loads(name: str) -> type:
    connector: Any = KVConnectorFactory.get_connector_class_by_name(name)

    class WithLoads(connector):  # type: ignore[misc]
        def start_load_kv(self, forward_context: Any, **more: Any) -> None:
            super().start_load_kv(forward_context, **more)
            for request in self._get_connector_metadata().requests:
                self._write("loaded", engine.tokens_to_load(request))

        def get_block_ids_with_load_errors(self) -> set[int]:
            failed: set[int] = super().get_block_ids_with_load_errors()
            self._write("failed", len(failed))
            return failed

        def _write(self, kind: str, count: int) -> None:
            path = self._vllm_config.kv_transfer_config.get_from_extra_config(engine.LOADS, None)
            if count and path:
                with open(path, "a") as file:
                    file.write(f"{kind}={count}\n")

    return WithLoads


def on_cpu() -> None:
    from lmcache.v1 import gpu_connector

    lmcache.connectors("cpu")
    here = cuda_stand_in.Torch()
    here.device = lambda name: torch.device("cpu")  # type: ignore[attr-defined]
    named = {"torch_device_type": "cuda", "torch_dev": SimpleNamespace(set_device=lambda number: None), "torch": here}
    gpu_connector.__dict__.update(named)


class InProcess(with_loads("LMCacheConnectorV1")):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if current_platform.is_cpu() and role == KVConnectorRole.WORKER:
            on_cpu()
        super().__init__(vllm_config, role, kv_cache_config)


def __getattr__(name: str) -> type:
    """Make `MultiProcess` only on first use, because vLLM's module of LMCacheMPConnector imports LMCache."""
    if name == "MultiProcess":
        globals()[name] = with_loads("LMCacheMPConnector")
        return globals()[name]  # type: ignore[no-any-return]
    raise AttributeError(name)
