"""The OffloadingConnector's own scheduler with a KV group of recurrent state, which the lab does not play (KVF334)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvfix_tools.lab.options import Options
from kvfix_tools.lab.steps import prompt
from tests.conftest import RELEASES, Once

#: Tokens of a prompt with a state that is handed over, and what a request allows: nothing said, 0, less, as many.
TOKENS = 40
LIMITS = (None, 0, 8, 40)


def stored() -> list[Any]:
    """Return, for each limit, how many blocks at the end of a prompt are stored, or the exception."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from kvfix_tools.lab.engine import vllm_objects

    options = Options(connector="offloading", block_size=16, num_blocks=32, extra={"blocks_per_chunk": 1})
    config = vllm_objects.vllm_config(options)
    config.cache_config.prefix_match_unit = 8
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    recurrent = MambaSpec(block_size=16, shapes=((16, 64),), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["m"], recurrent)]
    cache = KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=groups)
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    scheduler = connector.connector_scheduler
    assert scheduler.config.supports_partial_tail
    answers: list[Any] = []
    for number, limit in enumerate(LIMITS):
        request = vllm_objects.request(Options(block_size=8), f"r{number}", prompt(TOKENS, number), 4)
        request.kv_transfer_params = {} if limit is None else {"max_offload_tokens": limit}
        connector.on_new_request(request)
        status = scheduler._req_status[request.request_id]
        status.update_offload_keys()
        for group in status.group_states:
            group.block_ids = [1, 2, 3]
        handed = SimpleNamespace(boundary_state_offloads={request.request_id: [(1, 9, TOKENS)]})
        try:
            jobs = scheduler._build_partial_tail_store_jobs(SimpleNamespace(kv_connector_block_state=handed))
            answers.append(sum(len(job.src_spec.block_ids) for job in jobs.values()))
        except AssertionError as error:
            answers.append(type(error).__name__)
    return answers


def test_no_more_is_stored_than_the_request_allows(once: Once) -> None:
    assert once.both(stored, RELEASES / "0.5.6") == [[2, 2, "AssertionError", 2], [2, 0, 0, 2]]
