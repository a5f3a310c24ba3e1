"""The other connector of a MultiConnector: a stand-in that has what the schedule says it has, and is asked first.

vLLM takes the first connector that promises tokens; the other ones are asked too, and granted nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class OtherConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both roles. What it loads, the lab's engine writes into the slots."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        #: Requests that it has, all whole blocks but the one with the last token.
        self.has: set[str] = set()
        #: request -> (first token, end) of loads that were granted and are not done
        self.loads: dict[str, tuple[int, int]] = {}
        self._computed: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._computed[request.request_id] = num_computed_tokens
        if request.request_id not in self.has:
            return 0, False
        size = self._vllm_config.cache_config.block_size
        return max(0, (request.num_tokens - 1) // size * size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            start = self._computed[request.request_id]
            self.loads[request.request_id] = (start, start + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **more: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None: ...

    def wait_for_save(self) -> None: ...
