"""The worker's role of any connector (any_connector.py), called as vLLM's model runner calls it.

The order of the calls is that of vLLM (v1/worker/gpu_model_runner.py 0.32.0:3968-4216 and
model_executor/layers/attention/kv_transfer_utils.py:27-47).
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvfix_tools.lab.engine.memory import Slots
from kvfix_tools.lab.engine.tensor_memory import TensorMemory
from kvfix_tools.lab.engine.workers import Worker

if TYPE_CHECKING:
    from kvfix_tools.lab.connectors.any_connector import AnyConnector


class AnyWorker(Worker):
    def __init__(self, rank: int, slots: Slots, connector: Any, config: Any, memory: TensorMemory) -> None:
        super().__init__(rank, slots, connector, connector, None, {})
        self._config = config
        self.memory = memory
        layers = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in memory.kv_caches.items()}
        config.compilation_config.static_forward_context = layers
        connector.register_kv_caches(memory.kv_caches)
        self._step = ExitStack()
        self._report = KVConnectorOutput()
        #: Blocks that the last step has reported as failed.
        self._failed: set[int] = set()
        self.owner: AnyConnector

    def start_step(self, metadata: Any, forward: bool) -> None:
        self._output = copy.copy(self.owner.output)
        self._output.kv_connector_metadata = metadata
        kv_transfer_state._KV_CONNECTOR_AGENT = self.called
        self.called.handle_preemptions(metadata)
        if not forward:
            return
        with self._step as step:
            attention = self._attention()
            slots = {name: each.slot_mapping for name, each in attention.items()}
            context = set_forward_context(attention, self._config, self._tokens, slot_mapping=slots)
            step.enter_context(context)
            deferred = self._config.speculative_config is not None
            runner = KVConnectorModelRunnerMixin
            self._report = step.enter_context(runner._get_kv_connector_output(self._output, deferred))
            self._waits(0)
            self.memory.begin()
            self._step = step.pop_all()

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> KVConnectorOutput:
        runner = KVConnectorModelRunnerMixin
        try:
            if forward:
                with self._step:
                    self._saves(0)
                    wrong = self._other_layers()
                if self._config.speculative_config is not None:
                    runner.finalize_kv_connector()
                self._failed = self._report.invalid_block_ids
                self.owner.has_computed(wrong, self._failed)
            else:
                answer = runner.kv_connector_no_forward(self._output, self._config)
                self._report = answer.kv_connector_output or KVConnectorOutput()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._failed = self._report.invalid_block_ids
        self.owner.has_reported(self._report)
        return self._report

    def failed_blocks(self) -> set[int]:
        return self._failed

    def _other_layers(self) -> dict[int, int]:
        """Compute the layers after the first.

        Return {block: first layer whose KV in it differs from that of layer 0}.
        """
        wrong: dict[int, int] = {}
        for layer in list(self.memory.layers())[1:]:
            self._waits(layer)
            wrong = {**dict.fromkeys(self.memory.go_on(layer), layer), **wrong}
            self._saves(layer)
        return wrong

    def _waits(self, layer: int) -> None:
        for name in self._of_place(layer):
            self.called.wait_for_layer_load(name)

    def _saves(self, layer: int) -> None:
        context = get_forward_context()
        for name in self._of_place(layer):
            self.called.save_kv_layer(name, self.memory.kv_caches[name], context.attn_metadata[name])

    def _of_place(self, layer: int) -> list[str]:
        """Return the layer of each group that has this place in the memory."""
        return [group.layer_names[layer] for group in self.owner.groups]

    def _attention(self) -> dict[str, CPUAttentionMetadata]:
        """Return {layer: attention metadata of this step}, as vLLM's builder for the CPU makes it."""
        model = self.owner.events.model
        scheduled = self._output.num_scheduled_tokens
        starts = {name: model.start(name, tokens) for name, tokens in scheduled.items()}
        self._tokens = sum(scheduled.values())
        found = {}
        tables = [model.block_table, *(group.block_table for group in model.groups)]
        for group, table in zip(self.owner.groups, tables, strict=True):
            size = group.kv_cache_spec.block_size
            rows = [table.rows[name] for name in scheduled]
            slots = [
                row[at // size] * size + at % size if at // size < len(row) else -1
                for row, (name, tokens) in zip(rows, scheduled.items(), strict=True)
                for at in range(starts[name], starts[name] + tokens)
            ]
            ends = torch.tensor([starts[name] + tokens for name, tokens in scheduled.items()], dtype=torch.int32)
            widest = max(map(len, rows))
            metadata = CPUAttentionMetadata(
                num_actual_tokens=self._tokens,
                max_query_len=max(scheduled.values()),
                query_start_loc=torch.tensor([0, *scheduled.values()], dtype=torch.int32).cumsum(0),
                max_seq_len=int(ends.max()),
                seq_lens=ends,
                block_table=torch.tensor([row + [0] * (widest - len(row)) for row in rows], dtype=torch.int32),
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                scheduler_metadata=None,
            )
            found.update(dict.fromkeys(group.layer_names, metadata))
        return found
