"""Record the events, findings and counters of a run of the lab's engine."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix.engine_state.scheduler import QUEUES
from kvfix.ledger import Finding, Ledger, liveness
from kvfix.ledger import events as ev
from kvfix.ledger.liveness import OUTSIDE_STATUSES, Answer
from kvfix_tools.lab.connectors.connector import Connector
from kvfix_tools.lab.engine import rules
from kvfix_tools.lab.engine.counts import Counts
from kvfix_tools.lab.engine.model import Model
from kvfix_tools.lab.options import Options

#: A request is stuck if it waits this many steps for a load that is not in flight. An ended load is reported sooner.
STUCK = 8
#: Seconds that LMCache waits for a lookup (lookup_timeout_ms).
LOOKUP_TIMEOUT = 3.0


class Liveness:
    """Makes the argument of `liveness.can_move` from the scheduler's state, after a step that scheduled no tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = manager = scheduler.kv_cache_manager
        coordinator: Any = manager.coordinator
        allocate, count = manager.allocate_slots, coordinator.get_num_blocks_to_allocate
        #: (vLLM's last block count, True if the count is for the whole request) (kv_cache_manager.py 0.32.0:526, 561)
        self._counted = (0, False)
        #: The request for which the scheduler found too few blocks, and how many blocks the request needs.
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

    def state(self, in_flight: int, undecided: set[str], lookups: int) -> liveness.State:
        """Return the state after a step that scheduled no tokens. undecided: requests whose lookup has no result yet.

        in_flight: number of held blocks (`take_blocks`) and steps without output. lookups: number of lookups in flight.
        """
        scheduler = self._scheduler
        queues = [getattr(scheduler, name) for name in QUEUES if hasattr(scheduler, name)]
        waiting = [self._waiting(request, undecided) for queue in queues for request in queue]
        # vLLM keeps ended requests until their stores have ended
        ended = len(scheduler.requests) - len(waiting) - len(scheduler.running)
        free = self._manager.block_pool.get_num_free_blocks()
        return liveness.State(tuple(waiting), free, len(scheduler.running), in_flight + ended, lookups)

    def session_with_blocks(self) -> str:
        """Return the id of a session that holds blocks, or ""."""
        names = (name for name, each in self._scheduler.requests.items() if getattr(each, "resumable", False))
        return next((name for name in names if any(self._manager.get_block_ids(name))), "")

    def _waiting(self, request: Any, undecided: set[str]) -> liveness.Waiting:
        name, status = request.request_id, request.status
        waits_for, sessions = liveness.PLACE, getattr(self._scheduler, "num_waiting_for_streaming_input", 0)
        if status == RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._scheduler.finished_recving_kv_req_ids:
            waits_for = liveness.LOAD
        elif status.name in OUTSIDE_STATUSES or 0 < sessions >= self._scheduler.max_num_active_reqs:
            waits_for = liveness.OUTSIDE  # vLLM admits no request while `max_num_active_reqs` sessions wait for input
        elif name in undecided:
            waits_for = liveness.LOOKUP
        refused, needs = self._refused
        groups = self._manager.get_block_ids(name)
        held = sum(block != 0 for blocks in groups for block in blocks)  # null block 0 replaces a freed block
        return liveness.Waiting(name, waits_for, needs if request is refused else None, held)


class RequestEvents:
    """Records a run. log: (step, event) of each event. findings: violations of the rules of the ledger and the lab."""

    def __init__(self, scheduler: Scheduler, connector: Connector, model: Model, options: Options) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self.model = model
        self._ranks = options.ranks
        #: {request: {rank that has loaded: (end of the load, number of loaded tokens)}}
        self._arrived: dict[str, dict[int, tuple[int, int]]] = {}
        self._found: dict[str, int] = {}
        self.steps = 0
        #: The lab's own time, in seconds.
        self.seconds = 0.0
        self.log: list[tuple[int, ev.Event]] = []
        self.findings: list[Finding] = []
        self.counts = Counts(options)
        model.drafter.counts = self.counts
        #: Number of tokens that vLLM drops from the end of a hit: one block with EAGLE, 0 without EAGLE.
        self._dropped = options.block_size if getattr(scheduler, "use_eagle_block_drop", False) else 0
        self._by_priority = options.policy == "priority"
        #: {request: number of external tokens that the connector last promised}
        self._promised: dict[str, int] = {}
        #: Requests that were open while the server was stopped. Their stores may have holes. Their read locks time out.
        self.met_silence: set[str] = set()
        self._ledger = Ledger()
        self._ended: set[str] = set()
        #: Requests that have not ended.
        self._open: dict[str, Any] = {}
        self._preemptions: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        #: (`can_move`'s answer if no request can move, number of steps in a row with this answer), or (None, 0)
        self._still: tuple[Answer | None, int] = (None, 0)
        #: Requests whose lookup has no result yet.
        self.undecided: set[str] = set()
        #: {request: number of tokens that its last lookup found}
        self.hits: dict[str, int] = {}
        #: Requests whose loads the schedule makes fail. "" stands for all requests.
        self.may_fail: set[str] = set()

    def add(self, event: ev.Event) -> None:
        """Add an event and check the rules of the ledger."""
        self.log.append((self.steps, event))
        self.findings += self._ledger.feed(event)

    def violated(self, rule: rules.LabRule, request: str, message: str) -> None:
        self.findings.append(self.finding(rule, request, message))

    def finding(self, rule: rules.LabRule, request: str, message: str) -> Finding:
        event = self.log[-1][1] if self.log else ev.Raised(request, "", "")
        return Finding(rule.code, rule.name, "violated", request, message, event)

    def wrap_hooks(self, connector: Any) -> None:
        """Wrap two hooks of this connector to record the calls. The recorded results include the effect of fixes."""
        ask, grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(request: Any, computed: int) -> Any:
            promised, asynchronous = ask(request, computed)
            self.counts["last_blocks_dropped"] += self._block_is_dropped(request, computed)
            hit = self._connector.reader.hit(request.request_id)
            self.hits[request.request_id] = hit or 0
            self._promised[request.request_id] = promised or 0
            (self.undecided.add if promised is None else self.undecided.discard)(request.request_id)
            self.add(ev.Asked(request.request_id, request.num_tokens, computed, hit, promised, asynchronous))
            return promised, asynchronous

        def granted(request: Any, blocks: Any, external: int) -> Any:
            self.add(ev.Granted(request.request_id, external))
            passed_over = not external and self._promised.pop(request.request_id, 0) > 0
            self.counts["passed_over"] += passed_over and self._connector.loads_by_other(request.request_id)
            return grant(request, blocks, external)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = granted

    def _block_is_dropped(self, request: Any, computed: int) -> bool:
        """Return True if vLLM has cached the block after the `computed` tokens, but recomputes the block for EAGLE."""
        if not self._dropped or computed + self._dropped >= request.num_tokens or computed % self._dropped:
            return False
        pool = self._scheduler.kv_cache_manager.block_pool
        return bool(pool.get_cached_block(request.block_hashes[computed // self._dropped], [0]))

    def admitted(self, name: str) -> None:
        self._ended.discard(name)
        self._open[name] = self.model.requests[name]
        self._preemptions[name] = 0

    def preempted(self) -> None:
        for name, request in self._open.items():
            if request.num_preemptions > self._preemptions[name]:
                self._preemptions[name] = request.num_preemptions
                self.counts["preemptions"] += 1
                self.add(ev.Preempted(name))

    def scheduled(self, output: Any, metadata: Any) -> None:
        first = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        reader = self._connector.reader
        for name, start, end in reader.loads(metadata) or []:
            self._arrived.pop(name, None)
            self.add(ev.LoadDue(name, start, end, reader.whole_blocks, reader.relative))
        if self._by_priority and (waiting := [request.arrival_time for request in self._scheduler.waiting]):
            times = [self.model.requests[name].arrival_time for name in first]
            self.counts["came_first_by_priority"] += sum(time > min(waiting) for time in times)
        drafts = output.scheduled_spec_decode_tokens
        for name, tokens in output.num_scheduled_tokens.items():
            done = self.model.start(name, tokens)
            tokens -= len(drafts.get(name, ()))
            capacity = len(self.model.blocks(name)) * self.model.memories[0].block_size
            self.add(ev.Scheduled(name, done, tokens, capacity, name in first))

    def ended(self) -> None:
        for name, request in [item for item in self._open.items() if item[1].is_finished()]:
            self._end(name)
            self.counts["finished"] += 1
            self.counts["not_to_store"] += bool(self._connector.not_to_store(request))
            self.check_text(name)
            self.add(ev.Finished(name, False))

    def check_text(self, name: str) -> None:
        """Check the tokens of a request that has ended, or of a session that waits for input."""
        at = self.model.wrong_text(name)
        if at is not None:
            self.violated(rules.WRONG_TEXT, name, f"token {at} is not what the model says there")

    def _end(self, name: str) -> None:
        self._ended.add(name)
        self._open.pop(name, None)

    def aborted(self, name: str, doing: set[str]) -> None:
        self.add(ev.Finished(name, True))
        self.counts.update(("aborted", *(f"aborted_{each}" for each in doing)))
        self._end(name)

    def stuck(self) -> None:
        """Report requests that have waited STUCK steps for a load that is neither in flight nor reported as ended."""
        done = self._scheduler.finished_recving_kv_req_ids | self._scheduler.failed_recving_kv_req_ids
        for name, request in self._open.items():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            waits = waits and name not in self._connector.loading() and name not in done
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if self._waited[name] == STUCK:
                self.add(ev.Stuck(name, STUCK))

    def stands_still(self, answer: Answer | None) -> None:
        """Report a standstill after three equal answers in a row. answer: the answer of `can_move` in this step.

        A single answer can be wrong, because a lookup can end just after the scheduler has asked for its result.
        LMCache can also mistake the result of a lookup for the late result of another lookup, and drop it (KVF036).
        """
        before, steps = self._still
        if answer is None or answer.verdict != "violated":
            self._still = None, 0
            return
        self._still = answer, steps + 1 if answer == before else 1
        if self._still[1] == 3:
            self.violated(rules.NO_REQUEST_CAN_MOVE, answer.request, answer.message)

    def never_end(self) -> None:
        """Report requests that have not ended. The caller has made many steps before, with enough free blocks."""
        for name, request in self.model.requests.items():
            if not request.is_finished():
                self.violated(rules.NEVER_ENDS, name, f"is {request.status.name} for ever")

    def leaked(self) -> None:
        """Report state that the connector keeps after the end of all requests."""
        for where, names in self._connector.kept().items():
            for name in sorted(names & self._ended):
                self.add(ev.Left(name, where))

    def found(self, name: str, tokens: int, rank: int) -> None:
        if not rank:
            self._found[name] = tokens
        self.counts["ranks_differ"] += self._found.get(name) != tokens

    def loaded(self, name: str, end: int, tokens: int, rank: int = 0) -> None:
        """Note that a rank has loaded `tokens` tokens up to `end`. When all ranks have loaded, record the load."""
        arrived = self._arrived.setdefault(name, {})
        arrived[rank] = end, tokens
        if len(arrived) < self._ranks:
            return
        end, tokens = min(arrived.values())
        self.counts.loaded(tokens)
        self.add(ev.Loaded(name, tokens, end))
        due = self._ledger.histories[name].due
        if due is not None and end < due.end:
            if not self.may_fail.intersection((name, "")):
                self.violated(rules.LOAD_CAME_SHORT, name, f"loaded up to token {end}, but promised up to {due.end}")
            self.counts["loads_partial" if tokens else "loads_failed"] += 1
            self.counts["loads_of_groups_failed"] += len(self.model.groups) > 1
            self.add(ev.LoadFailed(name, None))
        if not any(name in worker.failing for worker in self._connector.workers):
            self.may_fail.discard(name)

    def stored(self, name: str, tokens: list[int], start: int, end: int, rank: int = 0) -> None:
        """Check a rank's store, and record stores of rank 0. Tokens of a hit count as cached even if their load failed.
        If stores skip cached chunks, do not record a store of an ended request. The store may have drafts that vLLM
        accepted in the last step. No Scheduled event counts these drafts, so the store would violate KVR008."""
        request = self.model.requests[name]
        if not rank:
            self.counts.stored(end - start)
            leaves_out = self._connector.reader.leaves_out_stored
            covered = start if leaves_out or name in self.met_silence else self.hits.get(name, 0)
            if not (leaves_out and request.is_finished()):
                self.add(ev.Stored(name, start, end, covered))
        why_not = self._connector.not_to_store(request)
        if why_not:
            self.violated(rules.STORED_AGAINST_POLICY, name, f"tokens {start} to {end} are stored, and {why_not}")
        if not self.model.prefixes[name].is_prefix(tokens):
            self.wrong_content(name, f"stores {len(tokens)} tokens, but the request begins with other tokens")

    def wrong_content(self, name: str, message: str) -> None:
        self.violated(rules.WRONG_CONTENT, name, message)

    def lookup_timed_out(self, name: str) -> None:
        """Record that the scheduler has waited for a lookup until the lookup timed out."""
        self.seconds += LOOKUP_TIMEOUT
        self.add(ev.TimedOut(name, LOOKUP_TIMEOUT, self.seconds))
