"""Make a state of `kvfix.ledger.liveness` from the lab's scheduler, after a step without any tokens."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger.liveness import LOAD, LOOKUP, OUTSIDE, PLACE, State, Waiting
from kvfix.ledger.owed import OUTSIDE_STATUSES


class Liveness:
    """Records the request that the scheduler found no blocks for, and how many blocks it needs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = manager = scheduler.kv_cache_manager
        coordinator: Any = manager.coordinator
        allocate, count = manager.allocate_slots, coordinator.get_num_blocks_to_allocate
        #: vLLM's last count of needed blocks, and True if it is for the whole request (kv_cache_manager.py 0.32.0:499,
        #: 540).
        self._counted = (0, False)
        self._refused: tuple[Any, int] = (None, 0)

        def get_num_blocks_to_allocate(*args: Any, **more: Any) -> Any:
            number = count(*args, **more)
            self._counted = number, more.get("apply_admission_cap", False)
            return number

        def allocate_slots(request: Any, *args: Any, **more: Any) -> Any:
            blocks = allocate(request, *args, **more)
            if blocks is None:
                number, whole = self._counted
                self._refused = request, number + (0 if whole else more.get("reserved_blocks", 0))
            return blocks

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
        manager.allocate_slots = allocate_slots

    def begin(self) -> None:
        self._refused = (None, 0)

    def state(self, in_flight: int, undecided: set[str], lookups: int) -> State:
        """Return the state after a step that scheduled nothing.

        - in_flight: transfers, answers to steps, and blocks of `take_blocks`
        - undecided: requests whose promise is not known yet
        - lookups: lookups in flight
        """
        scheduler = self._scheduler
        queues = [getattr(scheduler, name) for name in QUEUES if hasattr(scheduler, name)]
        waiting = [self._waiting(request, undecided) for queue in queues for request in queue]
        ended = len(scheduler.requests) - len(waiting) - len(scheduler.running)  # kept until their stores have ended
        free = self._manager.block_pool.get_num_free_blocks()
        return State(tuple(waiting), free, len(scheduler.running), in_flight + ended, lookups)

    def session_with_blocks(self) -> str:
        """Return a session that keeps blocks while it waits for input or for more blocks, or ""."""
        names = (name for name, each in self._scheduler.requests.items() if getattr(each, "resumable", False))
        return next((name for name in names if any(self._manager.get_block_ids(name))), "")

    def _waiting(self, request: Any, undecided: set[str]) -> Waiting:
        name, status = request.request_id, request.status
        waits_for = PLACE
        if status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._scheduler.finished_recving_kv_req_ids:
            waits_for = LOAD
        elif status.name in OUTSIDE_STATUSES or self._clients_hold_all_places():
            waits_for = OUTSIDE
        elif name in undecided:
            waits_for = LOOKUP
        refused, needs = self._refused
        groups = self._manager.get_block_ids(name)
        held = sum(block != 0 for blocks in groups for block in blocks)  # block 0 replaces a freed block
        return Waiting(name, waits_for, needs if request is refused else None, held)

    def _clients_hold_all_places(self) -> bool:
        """Return True if sessions that wait for input use all places of a step: vLLM then admits no other request."""
        sessions = getattr(self._scheduler, "num_waiting_for_streaming_input", 0)
        return bool(sessions) and sessions >= self._scheduler.max_num_active_reqs
