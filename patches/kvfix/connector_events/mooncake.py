"""The reader for vLLM's MooncakeConnector (mooncake/mooncake_connector.py 0.32.0)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from kvfix.connector_events import leases
from kvfix.engine_state.reader import Reader, Spans


class Mooncake(Reader):
    """Prefill writes into the blocks of decode. The metadata name only blocks after the prefix hit.

    Both instances identify a request by its transfer_id, which comes from the router.
    """

    keeps_for_peer = True
    relative = True
    _SCHEDULER = ("_reqs_need_recv", "_reqs_need_send")

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.whole_blocks = int(connector._vllm_config.cache_config.block_size)

    def loads(self, metadata: Any) -> Spans:
        """Leave out requests without blocks: for these, decode only notifies prefill."""
        return [
            (name, 0, len(meta.local_block_ids[0]) * self.whole_blocks)
            for of_engine in metadata.reqs_to_recv.values()
            for name, meta in of_engine.items()
            if any(meta.local_block_ids)
        ]

    def peer(self, request: Any) -> tuple[str, str] | None:
        return leases.named(request.kv_transfer_params, "remote_engine_id", "transfer_id")

    def lease(self, answer: Any) -> float | None:
        found = getattr(sys.modules.get("vllm.envs"), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", None)
        return float(found) if isinstance(found, int | float) else None

    def lease_name(self, request: Any) -> str:
        params = request.kv_transfer_params
        found = params.get("transfer_id") if isinstance(params, dict) else ""
        return found if isinstance(found, str) and len(found) <= leases.LONGEST else ""

    def kept(self) -> Iterable[tuple[str, Collection[str]]]:
        scheduler = getattr(self.connector, "connector_scheduler", None)
        for name in self._SCHEDULER if scheduler is not None else ():
            yield name, getattr(scheduler, name)
