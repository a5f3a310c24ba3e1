"""Turn the hook calls of one connector into events of `kvfix.ledger`, which checks the token counts.

The wrapper of a hook calls `before_HOOK` and `after_HOOK` with the hook's parameters. (See vLLM's
distributed/kv_transfer/kv_connector/v1/base.py 0.32.0.) The first argument of `after_HOOK` is the hook's answer. The
time that kvfix needs in a step must not grow with the number of running requests. So kvfix records a running request
only in steps in which the request loads, stores or resumes.
"""

from _thread import get_ident
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvfix import clock
from kvfix.connector_events import readers, recorder, violations, windows
from kvfix.connector_events.peers import Leases
from kvfix.engine_state import place
from kvfix.engine_state.reader import PINS, Reader, Span
from kvfix.ledger import Ledger
from kvfix.ledger import events as ev
from kvfix.ledger.events import Event
from kvfix.session import session

if TYPE_CHECKING:
    from kvfix.connector_events.audit import Audit

#: kvfix checks an ended request for leaks after STEPS steps and SECONDS seconds. By then, transfers usually have ended.
STEPS, SECONDS = 32, 3.0
#: A load should be in the metadata of the step that allocates its blocks. kvfix waits PATIENCE steps, then reports.
PATIENCE = 8
#: kvfix remembers at most this number of requests whose lookup was never answered.
GIVEN_UP = 1024


class WatchedConnector:
    """A connector or scheduler whose calls kvfix records."""

    def __init__(self, connector: Any, number: int) -> None:
        self.number = number
        self.generation = session.generation
        self.name = type(connector).__name__
        self.role = getattr(getattr(connector, "role", None), "name", "")
        self.place = place(connector)
        self.model = readers.model(connector)
        self.connector = connector
        self.reader = readers.reader(connector)
        #: False after an error in kvfix. The record then has gaps, so kvfix checks no more rules.
        self.trusted = True
        #: {thread in a hook: (the hook, start of the hook in monotonic seconds)}
        self.running: dict[int, tuple[str, float]] = {}
        self.calls: dict[str, int] = {}  # {hook: number of calls}
        self.steps = 0
        #: Time of the scheduler's last step, in monotonic seconds.
        self.stepped = 0.0
        #: The leases of the connector's worker, if the worker keeps blocks for a peer.
        self.leases: Leases | None = None
        #: Set if the configuration has `audit`, and the hits of this connector can be audited.
        self.audit: Audit | None = None
        self.sees_loads = type(self.reader) is not Reader
        self.ledger = Ledger(sees_loads=self.sees_loads)
        #: In the scheduler: {request: last lookup or load}. In the worker: {request: last load, store or comparison}.
        self._last: dict[str, Event] = {}
        self._due: dict[str, ev.LoadDue] = {}
        self._storing: list[Span] = []
        #: {request: ids of all blocks of the request}, only for requests with blocks for a load.
        self._blocks: dict[str, set[int]] = {}
        #: Finds stores of blocks that vLLM has freed; None if there is nothing to check (`windows.stores`).
        self._windows = windows.stores(connector)
        self._hits: dict[str, int] = {}
        self._admitted: set[str] = set()
        #: Requests whose lookup is in flight or timed out. LMCache may keep their state until the answer arrives.
        self._unanswered: set[str] = set()
        #: {request: step in which vLLM allocated blocks}, for asynchronous loads that are not in the metadata yet.
        self._granted: dict[str, int] = {}
        #: Ended requests whose blocks the connector still sends.
        self._sending: set[str] = set()
        #: The last GIVEN_UP requests whose lookup was never answered. The lookup client may keep their state.
        self._given_up: dict[str, None] = {}
        #: {ended request: (step, time, pins) when the request ended}. kvfix checks ended requests for leaks.
        self._ended: dict[str, tuple[int, float, Any]] = {}

    # ------------------------------------------------------------------ the scheduler's hooks

    def after_get_num_new_matched_tokens(self, answer: Any, request: Any, num_computed_tokens: int) -> None:
        name = request.request_id
        promised, asynchronous = answer
        if self._ended.pop(name, None) is not None:  # a new request reuses the id
            self._hits.pop(name, None)
            if name in self._unanswered:
                self._give_up(name)
        if name not in self._hits:
            self._reads_from(request)
        if name in self._admitted:  # old versions of vLLM do not report preemptions
            self._preempted(name)
        hit = self.reader.hit(name)
        self._hits[name] = hit or 0
        if promised is None:
            self._unanswered.add(name)
        elif hit is not None and name not in self._given_up:
            self._unanswered.discard(name)
        asked = ev.Asked(name, request.num_tokens, num_computed_tokens, hit, promised, bool(asynchronous), *self.model)
        if self._last.get(name) != asked:  # vLLM repeats the lookup in each step until the request gets blocks
            self._last[name] = asked
            self._record(asked)
        timeout = self.reader.lookup_timeout()
        if timeout and (waited := clock.now() - self.running[get_ident()][1]) >= timeout:
            self._record(ev.TimedOut(name, round(waited, 3), clock.now()))

    def before_update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        asked = self._last.pop(name, None)
        if num_external_tokens and isinstance(asked, ev.Asked) and asked.asynchronous:
            self._granted[name] = self.steps
        if num_external_tokens:
            self._blocks[name] = {block for group in blocks.get_block_ids() for block in group}
        self._record(ev.Granted(name, num_external_tokens))

    def after_build_connector_meta(self, answer: Any, scheduler_output: Any) -> None:
        self.steps += 1
        self.stepped = self.running[get_ident()][1]
        for name in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if name in self._admitted:  # otherwise a lookup has recorded the preemption already
                self._preempted(name)
        loads, stores = self.reader.loads(answer), self.reader.stores(answer)
        for name, start, end in loads or ():
            self._granted.pop(name, None)
            self._due_to_load(name, start, end)
        self._scheduled(scheduler_output, {name for name, _, _ in stores or ()})
        leaves_out = self.reader.leaves_out_stored
        for name, start, end in stores or ():
            hit = max(self._hits.get(name, 0), self.reader.found(name))
            self._record(ev.Stored(name, start, end, start if leaves_out else hit))
        if self._windows is not None:
            for lost in self._windows.step(answer, scheduler_output):
                self._record(lost)
        for name, since in list(self._granted.items()) if loads is not None else ():
            if self.steps - since >= PATIENCE:
                del self._granted[name]
                self._record(ev.Stuck(name, self.steps - since))
        if self._ended:
            self._look_for_leaks()

    def after_update_connector_output(self, answer: Any, connector_output: Any) -> None:
        for name in connector_output.finished_sending or ():
            self._sent(name)
        failed = set(getattr(connector_output, "failed_recving", None) or ())
        invalid = connector_output.invalid_block_ids
        if invalid:
            failed.update(name for name, blocks in self._blocks.items() if not blocks.isdisjoint(invalid))
        for name in failed:
            self._blocks.pop(name, None)
            self._record(ev.LoadFailed(name, None))
        for name in set(connector_output.finished_recving or ()) - failed:
            self._received(name)

    def before_request_finished(self, request: Any, *blocks: Any) -> None:
        name = request.request_id
        if name not in self._hits:
            self._reads_from(request)
        self._admitted.discard(name)
        self._granted.pop(name, None)
        self._blocks.pop(name, None)
        self._end(name)
        self._record(ev.Finished(name, request.status.name == "FINISHED_ABORTED"))

    def after_request_finished(self, answer: Any, request: Any, *blocks: Any) -> None:
        if answer and answer[0]:  # vLLM keeps the blocks until the connector has sent them
            self._ended.pop(request.request_id, None)
            self._sending.add(request.request_id)
            if self.reader.keeps_for_peer:
                self._record(ev.Leased(request.request_id, self.reader.lease(answer), self.reader.lease_name(request)))

    before_request_finished_all_groups = before_request_finished
    after_request_finished_all_groups = after_request_finished

    # ------------------------------------------------------------------ the worker's hooks

    def before_start_load_kv(self, forward_context: Any, **_: Any) -> None:
        metadata = getattr(self.connector, "_connector_metadata", None)
        if metadata is not None:
            for name, start, end in self.reader.loads(metadata) or ():
                self._due_to_load(name, start, end)

    def before_wait_for_save(self) -> None:
        """Read the stores before the hook runs, because the hook marks the stores as done."""
        metadata = getattr(self.connector, "_connector_metadata", None)
        self._storing = list(self.reader.stores(metadata) or ()) if metadata is not None else []
        for compared in self.audit.compared(self._storing, metadata) if self.audit is not None else ():
            self._last[compared.request] = compared
            self._record(compared)

    def after_wait_for_save(self, answer: Any) -> None:
        storing, self._storing = self._storing, []
        not_stored = self.reader.not_stored(self.connector._connector_metadata) if storing else ()
        for name, start, end in storing:
            if name not in not_stored:
                self._last[name] = stored = ev.Stored(name, start, end)
                self._ended.pop(name, None)
                self._record(stored)

    def after_get_finished(self, answer: Any, finished_req_ids: Iterable[str]) -> None:
        self.steps += 1
        sending, receiving = answer
        for name in receiving or ():
            self._received(name)
        for name in finished_req_ids:
            if name in self._last:
                self._record(ev.Finished(name, False))
            if not self.reader.sends(name):
                self._end(name)
            elif name in self._last:
                self._sending.add(name)
        if self.reader.keeps_for_peer:
            self._leases_end(sending or ())
        else:
            for name in sending or ():
                self._sent(name)
        if self._ended:
            self._look_for_leaks()

    def after_get_transfer_results(self, answer: Any, finished_req_ids: Iterable[str], *_: Any) -> None:
        received = answer.finished_recving - answer.failed_recving
        self.after_get_finished((answer.finished_sending, received), finished_req_ids)

    # ------------------------------------------------------------------ hooks of both roles

    def raised(self, hook: str, error: Exception, arguments: tuple[Any, ...]) -> None:
        name = getattr(arguments[0], "request_id", "") if arguments else ""
        self._record(ev.Raised(name, hook, violations.error_text(error)), error)

    def _record(self, event: Event, error: Exception | None = None) -> None:
        """Record the event. In modes `check` and `strict`, also check the rules. Raises Violation in mode `strict`."""
        hook, _ = self.running[get_ident()]
        recorder.add(self.number, hook, event)
        if session.mode in ("check", "strict") and self.trusted and event.request not in session.before:
            for finding in self.ledger.feed(event):
                if finding.verdict == "violated":
                    violations.report(self, hook, finding, error)
        elif isinstance(event, ev.Raised):
            violations.report_exception(self, hook, event)

    def _preempted(self, name: str) -> None:
        self._admitted.discard(name)
        self._last.pop(name, None)
        self._blocks.pop(name, None)  # a later failed load into these blocks belongs to another request
        self._record(ev.Preempted(name))

    def _scheduled(self, output: Any, transferred: set[str]) -> None:
        tokens = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._admitted.add(new.req_id)
            self._record(ev.Scheduled(new.req_id, new.num_computed_tokens, tokens[new.req_id], None, True))
        cached = output.scheduled_cached_reqs
        recorded = transferred.union(cached.resumed_req_ids)
        if recorded:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in recorded:
                    self._admitted.add(name)
                    self._record(ev.Scheduled(name, computed, tokens[name], None, name in cached.resumed_req_ids))

    def _due_to_load(self, name: str, start: int, end: int) -> None:
        reader = self.reader
        self._due[name] = self._last[name] = due = ev.LoadDue(name, start, end, reader.whole_blocks, reader.relative)
        self._ended.pop(name, None)  # a new request reuses the id
        self._record(due)

    def _received(self, name: str) -> None:
        due = self._due.pop(name, None)
        if due is not None:
            self._record(ev.Loaded(name, due.end - due.start, due.end))

    def _sent(self, name: str) -> None:
        if name in self._sending:
            self._sending.discard(name)
            self._end(name)
            if self.reader.keeps_for_peer:
                self._record(ev.LeaseEnded(name, None))

    def _leases_end(self, names: Iterable[str]) -> None:
        """Record the renewed leases, then the ended leases. Only the worker knows how a lease has ended."""
        found = self.leases
        for name in found.first_renewed() if found is not None else ():
            self._record(ev.LeaseExtended(name, found.extension if found is not None else None))
        for name in names:
            expired, renewed = found.ended(name) if found is not None else (None, 0)
            self._sending.discard(name)
            self._end(name)
            self._record(ev.LeaseEnded(name, expired, renewed))

    def _reads_from(self, request: Any) -> None:
        peer = self.reader.peer(request)
        if peer is not None:
            self._record(ev.ReadsFrom(request.request_id, *peer, self.reader.pushed))

    def _end(self, name: str) -> None:
        self._ended[name] = (self.steps, clock.now(), self.reader.pinned(name))

    def _give_up(self, name: str) -> None:
        self._given_up[name] = None
        if len(self._given_up) > GIVEN_UP:
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._unanswered.discard(oldest)

    def _look_for_leaks(self) -> None:
        """Check ended requests for leaks after STEPS steps and SECONDS seconds. `_ended` has the earliest end first."""
        now = clock.now()
        while self._ended:
            name, (at_step, at, pinned) = next(iter(self._ended.items()))
            if self.steps - at_step < STEPS or now - at < SECONDS:
                return
            del self._ended[name]
            if self.reader.waits(name):
                self._end(name)
                continue
            if name in self._unanswered and self.reader.looks_up(name):
                self._give_up(name)
            for where in self.reader.left(name):
                if name in self._unanswered and where.startswith("lookup_client."):
                    continue
                if where != PINS or self.reader.pinned(name) is pinned:  # else a new request has reused the id
                    self._record(ev.Left(name, where))
            if name not in self._given_up:
                self._unanswered.discard(name)
            self.ledger.forget(name)
            for state in (self._last, self._hits, self._due):
                state.pop(name, None)
