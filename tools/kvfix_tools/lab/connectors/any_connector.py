"""Run any connector in the lab, in both roles. The connector's own code moves the bytes of real KV cache tensors.

The lab replaces only the model and its layers. vLLM's factory makes the connector. KVConnectorModelRunnerMixin calls
the connector before and after each forward pass, with vLLM's forward context and attention metadata for the CPU.
"""

import copy
import dataclasses
import importlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as _Runner

from kvfix.engine_state.reader import Reader, Spans
from kvfix.ledger import events as ev
from kvfix_tools.lab.connectors.connector import Connector, OtherConnector
from kvfix_tools.lab.connectors.contract import Contract, Load, kept_requests
from kvfix_tools.lab.engine import rules, vllm_objects
from kvfix_tools.lab.engine.memory import Cache, Slots
from kvfix_tools.lab.engine.tensor_memory import TensorMemory
from kvfix_tools.lab.engine.workers import Worker
from kvfix_tools.lab.options import Options

#: The lab replaces this placeholder in the connector's configuration with the path of a new, empty folder per engine.
FOLDER = "{dir}"
#: During a transfer, the lab makes at most this number of consecutive steps without a forward pass (1 ms or more each).
PATIENCE = 500


class AnyReader(Reader):
    """A reader for a connector whose metadata kvfix cannot read. `loads` returns the loads with allocated blocks."""

    def __init__(self, connector: Any) -> None:
        super().__init__(connector)
        self.granted: list[tuple[str, int, int]] = []

    def loads(self, metadata: Any) -> Spans:
        granted, self.granted = self.granted, []
        return granted


class AnyWorker(Worker):
    """The worker role. The lab calls the hooks in vLLM's order (v1/worker/gpu_model_runner.py 0.32.0:3968-4216).

    For each layer, the lab calls the hooks of vLLM's model_executor/layers/attention/kv_transfer_utils.py:51-57.
    """

    def __init__(self, rank: int, slots: Slots, connector: Any, config: Any, memory: TensorMemory) -> None:
        super().__init__(rank, slots, connector, connector, None, {})
        self._config = config
        self.memory = memory
        layers = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in memory.kv_caches.items()}
        config.compilation_config.static_forward_context = layers
        connector.register_kv_caches(memory.kv_caches)
        self._step = ExitStack()
        self._report = KVConnectorOutput()
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
            step.enter_context(set_forward_context(attention, self._config, self._tokens, slot_mapping=slots))
            deferred = self._config.speculative_config is not None
            self._report = step.enter_context(_Runner._get_kv_connector_output(self._output, deferred))
            self._waits(0)
            self.memory.begin()
            self._step = step.pop_all()

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> KVConnectorOutput:
        try:
            if forward:
                with self._step:
                    self._saves(0)
                    wrong = self._other_layers()
                if self._config.speculative_config is not None:
                    _Runner.finalize_kv_connector()
                self.owner.has_computed(wrong, self._report.invalid_block_ids)
            else:
                answer = _Runner.kv_connector_no_forward(self._output, self._config)
                self._report = answer.kv_connector_output or KVConnectorOutput()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._failed = self._report.invalid_block_ids
        self.owner.has_reported(self._report)
        return self._report

    def failed_blocks(self) -> set[int]:
        return self._failed

    def _other_layers(self) -> dict[int, int]:
        """Compute all layers except layer 0. Return {block: first layer whose KV differs from the KV of layer 0}."""
        wrong: dict[int, int] = {}
        for layer in self.memory.layers()[1:]:
            self._waits(layer)
            wrong = {**dict.fromkeys(self.memory.go_on(layer), layer), **wrong}
            self._saves(layer)
        return wrong

    def _waits(self, layer: int) -> None:
        for group in self.owner.groups:
            self.called.wait_for_layer_load(group.layer_names[layer])

    def _saves(self, layer: int) -> None:
        context = get_forward_context()
        for name in [group.layer_names[layer] for group in self.owner.groups]:
            self.called.save_kv_layer(name, self.memory.kv_caches[name], context.attn_metadata[name])

    def _attention(self) -> dict[str, CPUAttentionMetadata]:
        """Return {layer name: attention metadata of this step}, in the form that vLLM's CPU backend uses."""
        model = self.owner.events.model
        scheduled = self._output.num_scheduled_tokens
        starts = {name: model.start(name, tokens) for name, tokens in scheduled.items()}
        self._tokens = sum(scheduled.values())
        found = {}
        for group, own in zip(self.owner.groups, model.groups, strict=True):
            size = group.kv_cache_spec.block_size
            rows = [own.rows[name] for name in scheduled]
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


class AnyConnector(Connector):
    """The tested connector, in the scheduler and worker roles. `Contract` checks the results of the hooks."""

    workers: Sequence[AnyWorker]

    def __init__(self, options: Options, memories: Sequence[Slots], caches: Sequence[Cache]) -> None:
        self.folder = tempfile.mkdtemp(prefix="kvfix-lab-") if FOLDER in str(options.config) else ""
        self.config = json.loads(json.dumps(options.config).replace(FOLDER, self.folder))
        self._options = options = dataclasses.replace(options, config=self.config)
        config = vllm_objects.vllm_config(options)
        self.scheduler = vllm_objects.scheduler(options, config)
        self.in_scheduler = self.scheduler.connector
        self.groups = self.scheduler.kv_cache_config.kv_cache_groups
        self.reader = AnyReader(self.in_scheduler)
        self.workers = [self._make_worker(rank, slots, config) for rank, slots in enumerate(memories)]
        self.output: Any = None
        #: loads: {request: load in flight}. sending: ended requests whose blocks the connector still holds.
        self.loads: dict[str, Load] = {}
        self.sending: set[str] = set()
        self._to_lose = False
        self._wrong: list[tuple[str, str]] = []
        #: Number of consecutive steps that computed nothing and reported no ended transfer.
        self._idle = 0
        self._contract = Contract(self)
        if options.beside:
            self.other = next(each for each in self.in_scheduler._connectors if isinstance(each, OtherConnector))

    def _make_worker(self, rank: int, slots: Slots, config: Any) -> AnyWorker:
        of_rank = vllm_objects.of_rank(config, rank)
        of_rank.compilation_config = copy.copy(config.compilation_config)
        connector = vllm_objects.worker(self._options, of_rank)
        memory = TensorMemory(self.scheduler.kv_cache_config)
        slots.put_in(memory.blocks)
        worker = AnyWorker(rank, slots, connector, of_rank, memory)
        worker.owner = self
        handshake = connector.get_handshake_metadata()
        if handshake is not None:
            self.in_scheduler.set_xfer_handshake_metadata_pp_aware({(0, rank): handshake})
        return worker

    def lose_stored(self) -> None:
        """Before the connector's next load, delete the connector's stored KV, so that the load fails."""
        self.events.may_fail.add("")
        self._to_lose = True

    def handed_out(self) -> None:
        """Delete stored KV if `lose_stored` was called. The lab calls this method before a worker gets metadata."""
        if self._to_lose and self.reader.granted:
            self._to_lose = False
            module, _, name = self._options.lose.rpartition(":")
            lose = getattr(importlib.import_module(module), name)
            for worker in self.workers:
                lose(worker.called)

    def lookups_fail(self, how_many: int) -> None:
        """Do nothing. The fuzzer calls this method, but the lab cannot intercept this connector's lookups."""

    def tick(self) -> None:
        if self._idle and self._in_flight():
            time.sleep(0.001)  # transfers take real time

    def granted(self, name: str, load: Load) -> None:
        """Fill the load's blocks with garbage in all layers. So the KV is right only if the connector loads the KV."""
        if self.other is None or name not in self.other.has:
            self.loads[name] = load
        self.reader.granted.append((name, load.start, load.end))
        for group, blocks in zip(self.groups, self.scheduler.kv_cache_manager.get_block_ids(name), strict=True):
            size = group.kv_cache_spec.block_size
            for block in blocks[load.start // size : -(-load.end // size)]:
                for worker in self.workers if block else ():
                    worker.memory.poison(block)

    def reads_wrong(self, name: str, message: str) -> None:
        """Keep the message until the step ends. Wrong KV is no violation if the connector reports a failed load."""
        self._wrong.append((name, message))

    def has_computed(self, wrong: dict[int, int], failed: set[int]) -> None:
        """Report wrong KV of requests without failed blocks. wrong: {block: first layer that differs from layer 0}."""
        found, self._wrong = self._wrong, []
        blocks = {name: self.events.model.blocks(name) for name in self.output.num_scheduled_tokens}
        for name, of_request in blocks.items():
            layers = [wrong[block] for block in of_request if block in wrong]
            if layers and name not in dict(found):
                found.append((name, f"the step reads other KV in layer {layers[0]} than in layer 0"))
        for name, message in found:
            if not failed.intersection(blocks[name]):
                self.events.wrong_content(name, message)
        for name in [name for name in blocks if name in self.loads and not self.loads[name].asynchronous]:
            self._loaded(name, failed)

    def has_reported(self, report: KVConnectorOutput) -> None:
        self._idle = 0 if self.output.total_num_scheduled_tokens else self._idle + 1
        if report.finished_recving or report.finished_sending:
            self._idle = 0
        self._contract.reported(report)
        for name in report.finished_recving or ():
            if name in self.loads:
                self._loaded(name, report.invalid_block_ids, name in report.failed_recving)
        self.sending -= report.finished_sending or set()

    def _loaded(self, name: str, failed: set[int], wholly: bool = False) -> None:
        """Record the end of a load. Tokens before the first failed block are loaded. wholly: the whole load failed."""
        load = self.loads.pop(name)
        size = self.groups[0].kv_cache_spec.block_size
        blocks = self.events.model.blocks(name)[load.start // size : -(-load.end // size)]
        good = next((number for number, block in enumerate(blocks) if block in failed), None)
        end = load.start if wholly else load.end if good is None else load.start // size * size + good * size
        if name in self.scheduler.requests and not self.scheduler.requests[name].is_finished():
            self.events.loaded(name, end, end - load.start)

    def _in_flight(self) -> bool:
        return bool(self.sending or any(load.asynchronous for load in self.loads.values()))

    def busy(self) -> bool:
        return self._in_flight() and self._idle < PATIENCE

    def loading(self) -> set[str]:
        return {name for name, load in self.loads.items() if load.asynchronous}

    def storing(self) -> set[str]:
        return self.sending

    def is_looking(self, request: str) -> bool:
        return request in self.events.undecided

    def metadata(self, metadata: Any) -> Any:
        return metadata

    def kept(self) -> dict[str, set[str]]:
        places: dict[str, set[str]] = {}
        for role, connector in (("scheduler", self.in_scheduler), ("worker", self.workers[0].called)):
            for where, names in kept_requests(connector, set(self.events.model.requests)).items():
                places[f"{where} ({role})"] = names
        return places

    def never_given_back(self) -> None:
        for name, request in self.scheduler.requests.items():
            if request.is_finished():
                what = "the request's load as done" if name in self.loads else "the request's blocks as sent"
                self.events.violated(rules.NEVER_GIVEN_BACK, name, f"vLLM keeps the blocks: no worker reported {what}")

    def close(self, keep: bool = False) -> None:
        """Shut both roles down, and delete the connector's folder. keep: leave the folder for the next engine."""
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        try:
            for role in (self.in_scheduler, *(worker.called for worker in self.workers)):
                role.shutdown()
        except Exception as error:  # noqa: BLE001 - recorded as an event
            self.events.add(ev.Raised("", "shutdown", f"{type(error).__name__}: {error}"))
        if self.folder and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
