"""A NixlConnector whose transfers return zeros while the file KVFIX_TEST_FAULT says so, for `kvfix verify`."""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

FAULT = Path(os.environ.get("KVFIX_TEST_FAULT", "/nonexistent"))
NixlConnector: Any = KVConnectorFactory.get_connector_class_by_name("NixlConnector")


class FaultyNixl(NixlConnector):  # type: ignore[misc]
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        worker = self.connector_worker
        reads = {name: meta.local_block_ids for name, meta in worker._recving_metadata.items()}
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving if FAULT.exists() and FAULT.read_text() == "zeros" else ():
            for blocks in reads.get(name, ()):
                for cache in worker.device_kv_caches.values():
                    cache[list(blocks)] = 0.0
        return results
