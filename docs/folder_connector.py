"""A connector that keeps the KV of each block in a separate file. The connector passes `kvfix conform`.

This connector works for one worker. With several workers, give each rank its own folder, and promise only blocks that
all ranks stored.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Transfers(KVConnectorMetadata):
    loads: dict = field(default_factory=dict)  # request -> [(file, block)]
    stores: list = field(default_factory=list)  # (file, block)


class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.folder = Path(self._kv_transfer_config.get_from_extra_config("folder", "kv"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.size = vllm_config.cache_config.block_size
        self.requests, self.stored, self.loads = {}, {}, {}  # used in the scheduler's role
        self.received, self.failed = set(), set()  # used in the worker's role

    def files(self, request):  # vLLM's block hash covers the adapter, the salt and all tokens up to the block's end
        return [str(self.folder / block_hash.hex()) for block_hash in request.block_hashes]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = end = num_computed_tokens // self.size
        files = self.files(request)
        while end < len(files) and os.path.exists(files[end]):
            end += 1
        return (end - first) * self.size, end > first

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.requests[request.request_id] = request
        if num_external_tokens:  # load into the last blocks, because vLLM has allocated no blocks after them
            pairs = list(zip(self.files(request), blocks.get_block_ids()[0], strict=False))
            self.loads[request.request_id] = pairs[len(pairs) - num_external_tokens // self.size :]

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, {}
        meta = Transfers(loads)
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request, blocks = self.requests[name], self._kv_cache_manager.get_block_ids(name)[0]
            start = request.num_computed_tokens
            end = start + tokens - len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            # store the blocks that are full after this step and contain no draft token
            pairs = list(zip(self.files(request), blocks, strict=False))[: end // self.size]
            meta.stores += pairs[min(start // self.size, self.stored.get(name, start)) :]
            self.stored[name] = len(pairs)
        return meta

    def request_finished(self, request, block_ids):
        self.requests.pop(request.request_id, None)
        self.stored.pop(request.request_id, None)
        return False, None  # the stores of a step end within the step

    def reset_cache(self):
        for file in self.folder.iterdir():
            file.unlink()
        return True

    def register_kv_caches(self, kv_caches):
        self.kv_caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        for name, pairs in self._get_connector_metadata().loads.items():
            # vLLM computes the failed blocks again, or ends the request with an error
            self.failed |= {block for file, block in pairs if not self.load(file, block)}
            self.received.add(name)

    def load(self, file, block):
        try:
            for layer, kv in load_file(file).items():
                self.kv_caches[layer][block] = kv
        except (OSError, SafetensorError):
            return False
        return True

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self):
        for file, block in self._get_connector_metadata().stores:
            layers = {name: cache[block].contiguous() for name, cache in self.kv_caches.items()}
            save_file(layers, f"{file}.part")
            os.replace(f"{file}.part", file)  # the file is complete, or does not exist

    def get_finished(self, finished_req_ids):
        received, self.received = self.received, set()
        return None, received

    def get_block_ids_with_load_errors(self):
        failed, self.failed = self.failed, set()
        return failed
