"""vLLM's OffloadingConnector on the CPU: its copies are memmove, and its streams and events are done at once.

vLLM refuses it without a GPU (kv_offload/cpu/spec.py 0.32.0:199). Everything else is as released.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvfix_tools.roundtrip import cuda_stand_in
from kvfix_tools.roundtrip.backends import vllm_offload

Released: Any = KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")


class Offloading(Released):  # type: ignore[misc]
    def register_kv_caches(self, kv_caches: Any) -> None:
        from vllm.v1.kv_offload.cpu import spec

        vllm_offload.offload("cpu")
        spec.current_platform = cuda_stand_in.CUDA
        cuda_stand_in.CUDA.is_cuda_alike = lambda: True
        super().register_kv_caches(kv_caches)
