"""A connector in both roles, in one process: what the lab's engine asks of it, whichever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvfix_tools.lab.request_events import RequestEvents


class Connector:
    """`in_scheduler`, `in_worker`: as vLLM calls it in each role. What it loads and stores goes to `events`."""

    scheduler: Scheduler
    in_scheduler: Any
    in_worker: Any
    #: Of kvfix.connector_events.readers, for the scheduler's role.
    reader: Any
    events: RequestEvents

    def listen(self, events: RequestEvents) -> None:
        self.events = events

    def hit(self, request: str) -> int | None:
        """Tokens that the last lookup of this request found, as long as the connector keeps it."""
        found: int | None = self.reader.hit(request)
        return found

    def due(self, metadata: Any) -> list[tuple[str, int, int]]:
        """(request, first token, end) of each load that the metadata tell the worker to start."""
        return self.reader.loads(metadata) or []

    def kept(self) -> dict[str, set[str]]:
        """Where the connector keeps what of which requests: all that must be gone when they have ended."""
        return {where: set(names) for where, names in self.reader.kept()}

    # ------------------------------------------------------------------ a step

    def tick(self) -> None:
        """A step of the engine begins."""

    def start_step(self, metadata: Any, forward: bool) -> None:
        """What vLLM's worker calls before the forward pass."""
        self.in_worker.bind_connector_metadata(metadata)
        self.in_worker.start_load_kv(SimpleNamespace(attn_metadata=object() if forward else None))

    def finish_step(
        self, forward: bool, ended: set[str], save_last: bool
    ) -> tuple[set[str] | None, set[str] | None, set[int]]:
        """What it calls after: (finished sending, finished receiving, blocks that failed to load)."""
        if forward and not save_last:
            self.in_worker.wait_for_save()
        sending, receiving = self.get_finished(ended)
        failed = self.in_worker.get_block_ids_with_load_errors()
        if forward and save_last:
            self.in_worker.wait_for_save()
        return sending, receiving, failed

    def get_finished(self, ended: set[str]) -> Any:
        return self.in_worker.get_finished(ended)

    # ------------------------------------------------------------------ what is in flight; by default nothing

    def busy(self) -> bool:
        """Whether a transfer or lookup is in flight."""
        return False

    def loading(self) -> set[str]:
        """Requests with a load in flight."""
        return set()

    def in_flight(self, request: str) -> set[str]:
        """What is in flight for this request between steps: looking, loading, storing."""
        return set()

    def failed_blocks(self) -> set[int]:
        """Blocks whose load has failed within this step."""
        return set()
