"""Shared by the fixes of LMCache's in-process worker: what a step must not store."""

from __future__ import annotations

from typing import Any


def store_nothing(impl: Any, request: Any) -> None:
    """The step stores nothing of this request. request: its metadata, of this step only.

    A kv_producer stores whatever the metadata say, by layers from its first token on (0.5.6 vllm_v1_adapter.py:1022,
    1152), but it has no tokens then.
    """
    request.save_spec.can_save = False
    if impl.kv_role == "kv_producer":
        request.save_spec.skip_leading_tokens = 0
        request.token_ids, request.slot_mapping = [], request.slot_mapping[:0]
