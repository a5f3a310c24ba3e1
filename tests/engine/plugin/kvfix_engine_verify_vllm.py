"""For tests of `kvfix verify` on the CPU, provide NixlConnector with a fault, and OffloadingConnector without CUDA."""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import vllm_offload

FAULT = Path(os.environ.get("KVFIX_TEST_FAULT", "/nonexistent"))
NixlConnector: Any = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
OffloadingConnector: Any = KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")


class FaultyNixl(NixlConnector):  # type: ignore[misc]
    """A NixlConnector that sets all received KV to zero while the text of the file FAULT is `zeros`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        worker = self.connector_worker
        reads = {name: meta.local_block_ids for name, meta in worker._recving_metadata.items()}
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving if FAULT.exists() and FAULT.read_text() == "zeros" else ():
            for blocks in reads.get(name, ()):
                for cache in worker.device_kv_caches.values():
                    cache[list(blocks)] = 0.0
        return results


class Offloading(OffloadingConnector):  # type: ignore[misc]
    """An OffloadingConnector that copies with memmove. vLLM's copies need a GPU (kv_offload/cpu/spec.py 0.32.0:199)."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        from vllm.v1.kv_offload.cpu import spec

        vllm_offload.offload("cpu")
        spec.current_platform = cuda_stand_in.CUDA
        cuda_stand_in.CUDA.is_cuda_alike = lambda: True
        super().register_kv_caches(kv_caches)
