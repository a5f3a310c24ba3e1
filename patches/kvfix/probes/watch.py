"""One connector of this process, watched: its hook calls become events of the ledger.

The functions named after hooks take the hook's own parameters (vllm/distributed/kv_transfer/kv_connector/v1/base.py
0.32.0). What happens on every step must cost nothing that grows with the running requests: of those that go on,
only one that is loaded or stored in this step is told.
"""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any

from kvfix import clock, step
from kvfix.ledger import Ledger
from kvfix.ledger import events as ev
from kvfix.probes import alarm, readers, recorder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvfix.ledger.events import Event

#: An ended request is looked for in the connector's state after so many steps, and so many seconds: transfers and
#: lookups that were under way are done by then.
STEPS, SECONDS = 32, 3.0
#: Steps without a load after which a request that was granted one waits for nothing. It is in the next metadata.
PATIENCE = 8
#: Requests whose lookup was never answered that are remembered.
GIVEN_UP = 1024


class Watch:
    """`running`: by thread, the hook that runs now, and since when (monotonic seconds). `calls`: how often each was
    called.

    trusted: False once a probe has failed: then something was not seen, and nothing is judged any more.
    """

    def __init__(self, connector: Any, number: int) -> None:
        self.number = number
        self.life = recorder.life
        self.name = type(connector).__name__
        self.role = getattr(getattr(connector, "role", None), "name", "")
        self.place = readers.place(connector)
        self.model = readers.model(connector)
        self.connector = connector
        self.reader = readers.reader(connector)
        self.trusted = True
        self.running: dict[int, tuple[str, float]] = {}
        self.calls: dict[str, int] = {}
        self.steps = 0
        self.sees_loads = type(self.reader) is not readers.Reader
        self.ledger = Ledger(sees_loads=self.sees_loads)
        self._hook = ""
        #: The last question that is not granted yet, and in the worker the last transfer, by request.
        self._last: dict[str, Event] = {}
        self._due: dict[str, ev.LoadDue] = {}
        self._storing: list[readers.Span] = []
        #: Of requests that were granted a load, as long as they hold them.
        self._blocks: dict[str, set[int]] = {}
        self._hits: dict[str, int] = {}
        self._admitted: set[str] = set()
        #: Requests whose lookup is under way, or was given up: what is kept for the answer may go when it comes.
        self._unanswered: set[str] = set()
        #: request -> step of the grant of a load between steps that is in no metadata yet
        self._granted: dict[str, int] = {}
        #: Ended requests whose blocks the connector still sends.
        self._sending: set[str] = set()
        #: Requests of which the lookup client may have kept something, since no answer ever came; the last GIVEN_UP.
        self._given_up: dict[str, None] = {}
        #: Those that must be gone: (step, seconds) of the end, and what was pinned for them then.
        self._ended: dict[str, tuple[int, float, Any]] = {}

    # ------------------------------------------------------------------ the scheduler's hooks

    def get_num_new_matched_tokens(self, answer: Any, request: Any, num_computed_tokens: int) -> None:
        name = request.request_id
        promised, asynchronous = answer
        if self._ended.pop(name, None) is not None and name in self._unanswered:  # this id is used again
            self._give_up(name)
        if name in self._admitted:  # early releases do not say who is preempted
            self._preempted(name)
        hit = self.reader.hit(name)
        self._hits[name] = hit or 0
        if promised is None:
            self._unanswered.add(name)
        elif hit is not None and name not in self._given_up:
            self._unanswered.discard(name)
        asked = ev.Asked(name, request.num_tokens, num_computed_tokens, hit, promised, bool(asynchronous), *self.model)
        if self._last.get(name) != asked:  # vLLM asks on each step until it has blocks
            self._last[name] = asked
            self.tell(asked)
        waited, timeout = clock.now() - self.running[get_ident()][1], self.reader.lookup_timeout()
        if timeout and waited >= timeout:
            self.tell(ev.TimedOut(name, round(waited, 3), clock.now()))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        asked = self._last.pop(name, None)
        if num_external_tokens and isinstance(asked, ev.Asked) and asked.asynchronous:
            self._granted[name] = self.steps
        if num_external_tokens:
            self._blocks[name] = {block for group in blocks.get_block_ids() for block in group}
        self.tell(ev.Granted(name, num_external_tokens))

    def build_connector_meta(self, answer: Any, scheduler_output: Any) -> None:
        self.steps += 1
        for name in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if name in self._admitted:  # preempted between steps and asked about since: told already
                self._preempted(name)
        loads, stores = self.reader.loads(answer), self.reader.stores(answer)
        for name, start, end in loads or ():
            self._granted.pop(name, None)
            self._due_to_load(name, start, end)
        self._scheduled(scheduler_output, {name for name, _, _ in stores or ()})
        for name, start, end in stores or ():
            self.tell(ev.Stored(name, start, end, self._hits.get(name, 0)))
        if loads is not None and self._granted:
            self._look_for_stuck()
        if self._ended:
            self._look_for_left()

    def update_connector_output(self, answer: Any, connector_output: Any) -> None:
        for name in connector_output.finished_sending or ():
            self._sent(name)
        received = set(connector_output.finished_recving or ())
        failed = set(getattr(connector_output, "failed_recving", None) or ())
        invalid = connector_output.invalid_block_ids
        if invalid:
            failed.update(name for name, blocks in self._blocks.items() if not blocks.isdisjoint(invalid))
        for name in failed:
            self._blocks.pop(name, None)
            self.tell(ev.LoadFailed(name, None))
        for name in received - failed:
            self._received(name)

    def request_finished(self, request: Any, *blocks: Any) -> None:
        name = request.request_id
        self._admitted.discard(name)
        self._granted.pop(name, None)
        self._blocks.pop(name, None)
        self._end(name)
        self.tell(ev.Finished(name, request.status.name == "FINISHED_ABORTED"))

    def request_finished_answer(self, answer: Any, request: Any, *blocks: Any) -> None:
        if answer and answer[0]:  # the blocks are kept until the connector has sent them
            self._ended.pop(request.request_id, None)
            self._sending.add(request.request_id)

    # ------------------------------------------------------------------ the worker's hooks

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        metadata = getattr(self.connector, "_connector_metadata", None)
        if metadata is not None:
            for name, start, end in self.reader.loads(metadata) or ():
                self._due_to_load(name, start, end)

    def wait_for_save(self) -> None:
        """Looked at before: the hook itself marks as stored what it has stored."""
        metadata = getattr(self.connector, "_connector_metadata", None)
        self._storing = list(self.reader.stores(metadata) or ()) if metadata is not None else []

    def wait_for_save_answer(self, answer: Any) -> None:
        storing, self._storing = self._storing, []
        kept_back = self.reader.kept_back(self.connector._connector_metadata) if storing else ()
        for name, start, end in storing:
            if name not in kept_back:
                self._last[name] = stored = ev.Stored(name, start, end)
                self._ended.pop(name, None)
                self.tell(stored)

    def get_finished(self, answer: Any, finished_req_ids: Iterable[str]) -> None:
        self.steps += 1
        sending, receiving = answer
        for name in receiving or ():
            self._received(name)
        for name in finished_req_ids:
            if name in self._last:
                self.tell(ev.Finished(name, False))
            if not self.reader.reports_sent:
                self._end(name)
            elif name in self._last:
                self._sending.add(name)
        for name in sending or ():
            self._sent(name)
        if self._ended:
            self._look_for_left()

    # ------------------------------------------------------------------ any of them

    def raised(self, hook: str, error: Exception, arguments: tuple[Any, ...]) -> None:
        """An exception leaves a hook."""
        name = getattr(arguments[0], "request_id", "") if arguments else ""
        self._hook = hook
        self.tell(ev.Raised(name, hook, alarm.words_of(error)), error)

    def tell(self, event: Event, error: Exception | None = None) -> None:
        """Raises `alarm.Violation` in mode `strict`."""
        hook = self.running.get(get_ident(), (self._hook,))[0]
        recorder.add(self.number, hook, event)
        if alarm.mode != "observe" and self.trusted:
            for finding in self.ledger.feed(event):
                if finding.verdict == "violated":
                    alarm.ring(self, hook, finding, error)
        elif isinstance(event, ev.Raised):
            alarm.crash(self, hook, event)

    def _preempted(self, name: str) -> None:
        self._admitted.discard(name)
        self._last.pop(name, None)
        self._blocks.pop(name, None)  # a load into them that fails now is another's
        self.tell(ev.Preempted(name))

    def _scheduled(self, output: Any, transferred: set[str]) -> None:
        tokens = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._admitted.add(new.req_id)
            self.tell(ev.Scheduled(new.req_id, new.num_computed_tokens, tokens[new.req_id], None, True))
        resumed = step.resumed(output)
        told = transferred.union(resumed)
        if told:
            cached = output.scheduled_cached_reqs
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in told:
                    self._admitted.add(name)
                    self.tell(ev.Scheduled(name, computed, tokens[name], None, name in resumed))

    def _due_to_load(self, name: str, start: int, end: int) -> None:
        self._due[name] = self._last[name] = due = ev.LoadDue(name, start, end)
        self._ended.pop(name, None)  # this id is used again
        self.tell(due)

    def _received(self, name: str) -> None:
        due = self._due.pop(name, None)
        if due is not None:
            self.tell(ev.Loaded(name, due.end - due.start, due.end))

    def _sent(self, name: str) -> None:
        if name in self._sending:
            self._sending.discard(name)
            self._end(name)

    def _end(self, name: str) -> None:
        self._ended[name] = (self.steps, clock.now(), self.reader.pinned(name))

    def _give_up(self, name: str) -> None:
        self._given_up[name] = None
        if len(self._given_up) > GIVEN_UP:
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._unanswered.discard(oldest)

    def _look_for_stuck(self) -> None:
        for name, since in list(self._granted.items()):
            if self.steps - since >= PATIENCE:
                del self._granted[name]
                self.tell(ev.Stuck(name, self.steps - since))

    def _look_for_left(self) -> None:
        """The first to have ended are the first in the dictionary."""
        now = clock.now()
        for name, (at_step, at, pinned) in list(self._ended.items()):
            if self.steps - at_step < STEPS or now - at < SECONDS:
                return
            del self._ended[name]
            if name in self._unanswered and self.reader.looks_up(name):
                self._give_up(name)
            for where in self.reader.left(name):
                if name in self._unanswered and where.startswith("lookup_client."):
                    continue
                if where != readers.PINS or self.reader.pinned(name) is pinned:  # else the id is in use again
                    self.tell(ev.Left(name, where))
            if name not in self._given_up:
                self._unanswered.discard(name)
            self.ledger.forget(name)
            for memory in (self._last, self._hits, self._due):
                memory.pop(name, None)
