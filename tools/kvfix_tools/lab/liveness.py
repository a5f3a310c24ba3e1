"""Whether the lab's waiting requests can move: a state of `kvfix.ledger.liveness`, after a step without any tokens."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE, State, Waiting

_OUTSIDE = {"WAITING_FOR_STREAMING_REQ", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"}
#: Where vLLM keeps waiting requests, in the order in which it asks them: 0.32.0, and before.
_QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")


class Liveness:
    """It notes for which request the scheduler has found no blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = manager = scheduler.kv_cache_manager
        self._allocate = allocate = manager.allocate_slots
        self._refused: tuple[Any, ...] = (None, (), {})

        def allocate_slots(request: Any, *args: Any, **more: Any) -> Any:
            blocks = allocate(request, *args, **more)
            if blocks is None:
                self._refused = (request, args, more)
            return blocks

        manager.allocate_slots = allocate_slots

    def begin(self) -> None:
        """A step begins."""
        self._refused = (None, (), {})

    def state(self, in_flight: int, undecided: set[str], lookups: int) -> State:
        """After a step that has scheduled nothing. undecided: requests for which the connector promises nothing yet.

        in_flight: transfers, answers to steps, and blocks of others that will come free. lookups: in flight.
        """
        scheduler = self._scheduler
        queues = [getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)]
        waiting = [self._waiting(request, undecided) for queue in queues for request in queue]
        ended = len(scheduler.requests) - len(waiting) - len(scheduler.running)  # until their stores are done
        free = self._manager.block_pool.get_num_free_blocks()
        return State(tuple(waiting), free, len(scheduler.running), in_flight + ended, lookups)

    def _waiting(self, request: Any, undecided: set[str]) -> Waiting:
        name, status = request.request_id, request.status
        waits_for = PLACE
        if status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._scheduler.finished_recving_kv_req_ids:
            waits_for = LOAD
        elif status.name in _OUTSIDE:
            waits_for = OUTSIDE
        elif name in undecided:
            waits_for = LOOKUP
        return Waiting(name, waits_for, self._needs(request), sum(map(len, self._blocks(request))))

    def _blocks(self, request: Any) -> Any:
        return self._manager.get_block_ids(request.request_id)

    def _needs(self, request: Any) -> int | None:
        """What `allocate_slots` (v1/core/kv_cache_manager.py 0.32.0:522-579) compares with the free blocks."""
        refused, args, more = self._refused
        groups = self._blocks(request)
        if request is not refused or len(groups) > 1:
            return None
        asked = inspect.signature(self._allocate).bind(request, *args, **more).arguments
        size: int = self._scheduler.block_size
        hit = asked.get("new_computed_blocks")
        used: int = sum(block.ref_cnt > 0 for block in hit.blocks[0]) if hit is not None else 0
        counts = ("num_new_tokens", "num_new_computed_tokens", "num_external_computed_tokens", "num_lookahead_tokens")
        tokens: int = request.num_computed_tokens + sum(asked.get(name, 0) for name in counts)
        reserved: int = asked.get("reserved_blocks", 0)
        whole: int = request.num_tokens if asked.get("full_sequence_must_fit") else 0
        return max(-(-tokens // size) + reserved, -(-whole // size)) - len(groups[0]) - used
