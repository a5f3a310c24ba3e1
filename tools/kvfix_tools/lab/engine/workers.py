"""The ranks of an engine. Each rank has a connector in the worker role, its own memory and its own part of the cache.

If an engine has one worker, the scheduler and the worker share objects. Several workers get copies, as if each worker
ran in its own process, and vLLM's own aggregator joins the workers' reports.
"""

import copy
import copyreg
import io
import pickle
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from kvfix_tools.lab.engine.memory import Slots

#: A fast way to pickle tensors. Torch's own way takes as long as a step of the lab.
_TENSORS = {**copyreg.dispatch_table, torch.Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}


@dataclass(eq=False)
class Worker:
    """One rank. in_worker: the tested connector. adapter: the object to which this connector delegates."""

    rank: int
    slots: Slots
    called: Any  # the connector that vLLM calls, which can be a MultiConnector with `in_worker` as a child
    in_worker: Any
    adapter: Any
    failing: dict[str, int]  # {request: number of chunks after which its next load fails}
    unanswered = False  # True: the server does not answer the multi-process connector in this step
    _failed_requests = set[str]()  # requests whose load the last step has reported as failed
    offloads = False  # True if the MultiConnector has an OffloadingConnector
    clears = False  # True if a step ends with a call of `clear_connector_metadata`
    by_request = False  # True if the connector reports the requests of failed loads, not the blocks

    def start_step(self, metadata: Any, forward: bool) -> None:
        """Call the connector as vLLM's worker does before the forward pass."""
        self.bind(metadata)
        self.called.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def bind(self, metadata: Any) -> None:
        if hasattr(self.called, "handle_preemptions"):  # vLLM 0.11 lacks this method
            self.called.handle_preemptions(metadata)
        self.called.bind_connector_metadata(metadata)

    def finish_step(self, forward: bool, ended: set[str], save_last: bool) -> KVConnectorOutput:
        """Call the connector as vLLM's worker does after the forward pass. Return the report of this rank."""
        save_last = save_last and forward
        # without a forward pass, only OffloadingConnector saves, because it saves the last chunks of ended requests
        if not save_last and (forward or self.offloads):
            self.called.wait_for_save()
        sending, receiving = self.get_finished(ended)
        failed = self.called.get_block_ids_with_load_errors()
        if save_last:
            self.called.wait_for_save()
        report = KVConnectorOutput(
            finished_sending=sending, finished_recving=receiving, invalid_block_ids=failed, **self.also_reported()
        )
        if self.clears:
            self.called.clear_connector_metadata()
        return report

    def get_finished(self, ended: set[str]) -> Any:
        if not self.by_request:
            return self.called.get_finished(ended)
        results = self.called.get_transfer_results(ended)
        self._failed_requests = set(results.failed_recving)
        return results.finished_sending, results.finished_recving

    def also_reported(self) -> dict[str, Any]:
        """Return the fields of KVConnectorOutput that only some connectors fill."""
        meta = {"kv_connector_worker_meta": self.called.build_connector_worker_meta()} if self.offloads else {}
        return {**meta, **({"failed_recving": self._failed_requests} if self.by_request else {})}

    def failed_blocks(self) -> set[int]:
        return set()


class Executor:
    """Copies metadata to the workers, and joins their reports, as vLLM does (multiproc_executor.py 0.32.0:382)."""

    def __init__(self, connector: Any, ranks: int, counts: Counter[str]) -> None:
        self._ranks = ranks
        self._counts = counts
        self._aggregator = KVOutputAggregator.from_connector(connector, ranks) if ranks > 1 else None

    def handed_out(self, metadata: Any) -> list[Any]:
        if self._ranks == 1:
            return [metadata]
        message = io.BytesIO()
        pickler = pickle.Pickler(message, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _TENSORS
        pickler.dump(metadata)
        return [pickle.loads(message.getbuffer()) for _ in range(self._ranks)]

    def answer(self, output: ModelRunnerOutput, reports: list[KVConnectorOutput]) -> ModelRunnerOutput:
        """Add the joined reports of all ranks to the first rank's output."""
        if self._aggregator is None:
            output.kv_connector_output = reports[0]
            return output
        outputs = [output, *(copy.copy(EMPTY_MODEL_RUNNER_OUTPUT) for _ in reports[1:])]
        for each, report in zip(outputs, reports, strict=True):
            each.kv_connector_output = report
        self._aggregator.aggregate(outputs)
        for kind in ("finished_sending", "finished_recving"):
            reported = set().union(*(getattr(report, kind) or () for report in reports))
            self._counts["ranks_apart"] += len(reported - (getattr(output.kv_connector_output, kind) or set()))
        failed = [(report.invalid_block_ids, getattr(report, "failed_recving", None)) for report in reports]
        self._counts["failed_on_one_rank"] += any(each != failed[0] for each in failed)
        return output
