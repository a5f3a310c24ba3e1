"""Tells the record what happens to each request: the connector's hooks, the scheduler's steps, the side's transfers."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix.ledger import events as ev
from kvfix_tools.lab.model import Model
from kvfix_tools.lab.record import Record

#: Steps that a request may wait for a load that is not under way: longer than an answer takes.
PATIENCE = 8


class Watcher:
    """Events of every request's story, and what is wrong that the ledger cannot see (LAB002, 003, 008)."""

    def __init__(self, scheduler: Scheduler, side: Any, model: Model, record: Record) -> None:
        self._scheduler = scheduler
        self._side = side
        self._model = model
        self._record = record
        self._ended: set[str] = set()
        self._preemptions: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        #: request -> tokens that its last lookup found
        self.hits: dict[str, int] = {}
        #: Requests whose load may come short because the world made it; "" for all.
        self.may_fail: set[str] = set()

    def listen(self, connector: Any) -> None:
        """See the hooks' answers. The wrappers stand on the instance, over whatever the class holds, fixes included."""
        ask, grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        tell = self._record.tell

        def asked(request: Any, computed: int) -> Any:
            promised, asynchronous = ask(request, computed)
            hit = self._side.hit(request.request_id)
            self.hits[request.request_id] = hit or 0
            tell(ev.Asked(request.request_id, request.num_tokens, computed, hit, promised, asynchronous))
            return promised, asynchronous

        def granted(request: Any, blocks: Any, external: int) -> Any:
            tell(ev.Granted(request.request_id, external))
            return grant(request, blocks, external)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = granted

    def admitted(self, name: str) -> None:
        """Forget the life of another request of this id."""
        self._ended.discard(name)
        self._preemptions[name] = 0

    # ------------------------------------------------------------------ what the scheduler did

    def preempted(self) -> None:
        for name, request in self._model.requests.items():
            if request.num_preemptions > self._preemptions[name]:
                self._preemptions[name] = request.num_preemptions
                self._record.counts["preemptions"] += 1
                self._record.tell(ev.Preempted(name))

    def scheduled(self, output: Any, metadata: Any) -> None:
        resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        first = {new.req_id for new in output.scheduled_new_reqs} | set(resumed)
        for due in self._side.due(metadata):
            self._record.tell(ev.LoadDue(*due))
        for name, tokens in output.num_scheduled_tokens.items():
            done = self._model.requests[name].num_computed_tokens - tokens
            capacity = len(self._model.blocks(name)) * self._model.slots.block_size
            self._record.tell(ev.Scheduled(name, done, tokens, capacity, name in first))

    def ended(self) -> None:
        for name, request in self._model.requests.items():
            if request.is_finished() and name not in self._ended:
                self._ended.add(name)
                self._record.counts["finished"] += 1
                at = self._model.wrong_text(name)
                if at is not None:
                    self._record.found("LAB008", "wrong-text", name, f"token {at} is not what the model says there")
                self._record.tell(ev.Finished(name, False))

    def aborted(self, name: str, doing: set[str]) -> None:
        self._record.tell(ev.Finished(name, True))
        self._record.counts.update(("aborted", *(f"aborted_{each}" for each in doing)))
        self._ended.add(name)

    def stuck(self) -> None:
        """Who waits for a load that is not under way, for longer than an answer takes.

        One whose load is done and reported waits for a place in a step, as everybody does.
        """
        done = self._scheduler.finished_recving_kv_req_ids | self._scheduler.failed_recving_kv_req_ids
        for name, request in self._model.requests.items():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            waits = waits and name not in self._side.loading() and name not in done
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if self._waited[name] == PATIENCE:
                self._record.tell(ev.Stuck(name, PATIENCE))

    def never_ends(self) -> None:
        for name, request in self._model.requests.items():
            if not request.is_finished():
                self._record.found("LAB003", "never-ends", name, f"is {request.status.name} for ever")

    # ------------------------------------------------------------------ what the side did

    def loaded(self, name: str, start: int, end: int, tokens: int) -> None:
        self._record.counts["loaded_tokens"] += tokens
        self._record.tell(ev.Loaded(name, tokens, end))
        due = self._record.ledger.stories[name].due
        if due is not None and end < due.end:
            if not self.may_fail.intersection((name, "")):
                what = f"loaded up to {end} of {due.end} that were promised"
                self._record.found("LAB002", "load-came-short", name, what)
            self._record.counts["loads_partial" if tokens else "loads_failed"] += 1
            self._record.tell(ev.LoadFailed(name, None))
        self.may_fail.discard(name)

    def stored(self, name: str, tokens: list[int], start: int, end: int) -> None:
        """What was hit is there, also if the load of it failed."""
        self._record.counts["stored_tokens"] += end - start
        self._record.tell(ev.Stored(name, start, end, self.hits.get(name, 0)))
        if not self._model.prefixes[name].is_prefix(tokens):
            self._record.corrupt(name, f"stores {len(tokens)} tokens that are not the first ones of the request")

    def timed_out(self, name: str, seconds: float) -> None:
        self._record.seconds += seconds
        self._record.tell(ev.TimedOut(name, seconds, self._record.seconds))

    def left(self) -> None:
        """All is over: what is kept of requests that have ended."""
        for where, names in self._side.state().items():
            for name in sorted(names):
                if name in self._ended:
                    self._record.tell(ev.Left(name, where))
