"""What happens to each request as events of the ledger: hook calls, the scheduler's steps, the connector's transfers.

Not those of kvfix's own hooks in an engine (kvfix.connector_events): these see what the connector says. The lab tells
of every question, of every request in every step, and of what its memory has really moved, on the lab's own time.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvfix import scheduling
from kvfix.ledger import events as ev
from kvfix_tools.lab import rules
from kvfix_tools.lab.connector import Connector
from kvfix_tools.lab.model import Model
from kvfix_tools.lab.run_log import RunLog

#: Steps that a request may wait for a load that is not in flight: longer than an answer takes.
PATIENCE = 8
#: Seconds that LMCache waits for a lookup (lookup_timeout_ms).
LOOKUP_TIMEOUT = 3.0


class RequestEvents:
    """Also looks for what the ledger cannot see (LAB001 of stores, LAB002, LAB003, LAB008)."""

    def __init__(self, scheduler: Scheduler, connector: Connector, model: Model, log: RunLog) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._model = model
        self._log = log
        self._ended: set[str] = set()
        self._preemptions: dict[str, int] = {}
        self._waited: dict[str, int] = {}
        #: request -> tokens that its last lookup found
        self.hits: dict[str, int] = {}
        #: Requests whose load may come short because the schedule makes it; "" for all.
        self.may_fail: set[str] = set()

    def wrap_hooks(self, connector: Any) -> None:
        """See the hooks' answers. The wrappers stand on the instance, over whatever the class holds, fixes included."""
        ask, grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def asked(request: Any, computed: int) -> Any:
            promised, asynchronous = ask(request, computed)
            hit = self._connector.hit(request.request_id)
            self.hits[request.request_id] = hit or 0
            self._log.add(ev.Asked(request.request_id, request.num_tokens, computed, hit, promised, asynchronous))
            return promised, asynchronous

        def granted(request: Any, blocks: Any, external: int) -> Any:
            self._log.add(ev.Granted(request.request_id, external))
            return grant(request, blocks, external)

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = granted

    def admitted(self, name: str) -> None:
        """Forget an earlier request of this id."""
        self._ended.discard(name)
        self._preemptions[name] = 0

    # ------------------------------------------------------------------ what the scheduler did

    def preempted(self) -> None:
        for name, request in self._model.requests.items():
            if request.num_preemptions > self._preemptions[name]:
                self._preemptions[name] = request.num_preemptions
                self._log.counts["preemptions"] += 1
                self._log.add(ev.Preempted(name))

    def scheduled(self, output: Any, metadata: Any) -> None:
        first = {new.req_id for new in output.scheduled_new_reqs}.union(scheduling.resumed(output))
        for due in self._connector.due(metadata):
            self._log.add(ev.LoadDue(*due))
        for name, tokens in output.num_scheduled_tokens.items():
            done = self._model.requests[name].num_computed_tokens - tokens
            capacity = len(self._model.blocks(name)) * self._model.slots.block_size
            self._log.add(ev.Scheduled(name, done, tokens, capacity, name in first))

    def ended(self) -> None:
        for name, request in self._model.requests.items():
            if request.is_finished() and name not in self._ended:
                self._ended.add(name)
                self._log.counts["finished"] += 1
                at = self._model.wrong_text(name)
                if at is not None:
                    self._log.violated(rules.WRONG_TEXT, name, f"token {at} is not what the model says there")
                self._log.add(ev.Finished(name, False))

    def aborted(self, name: str, doing: set[str]) -> None:
        self._log.add(ev.Finished(name, True))
        self._log.counts.update(("aborted", *(f"aborted_{each}" for each in doing)))
        self._ended.add(name)

    def stuck(self) -> None:
        """Who waits for a load that is not in flight, for longer than an answer takes.

        One whose load is done and reported waits for a place in a step, as all do.
        """
        done = self._scheduler.finished_recving_kv_req_ids | self._scheduler.failed_recving_kv_req_ids
        for name, request in self._model.requests.items():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            waits = waits and name not in self._connector.loading() and name not in done
            self._waited[name] = self._waited.get(name, 0) + 1 if waits else 0
            if self._waited[name] == PATIENCE:
                self._log.add(ev.Stuck(name, PATIENCE))

    def never_end(self) -> None:
        """All is free, many steps were made, and these requests are still there."""
        for name, request in self._model.requests.items():
            if not request.is_finished():
                self._log.violated(rules.NEVER_ENDS, name, f"is {request.status.name} for ever")

    def leaked(self) -> None:
        """All is over: what is kept of requests that have ended."""
        for where, names in self._connector.kept().items():
            for name in sorted(names & self._ended):
                self._log.add(ev.Left(name, where))

    # ------------------------------------------------------------------ what the connector did

    def loaded(self, name: str, end: int, tokens: int) -> None:
        """A load is done: so many tokens were moved, the last before `end`."""
        self._log.counts["loaded_tokens"] += tokens
        self._log.add(ev.Loaded(name, tokens, end))
        due = self._log.ledger.histories[name].due
        if due is not None and end < due.end:
            if not self.may_fail.intersection((name, "")):
                self._log.violated(rules.LOAD_CAME_SHORT, name, f"loaded up to {end} of {due.end} that were promised")
            self._log.counts["loads_partial" if tokens else "loads_failed"] += 1
            self._log.add(ev.LoadFailed(name, None))
        self.may_fail.discard(name)

    def stored(self, name: str, tokens: list[int], start: int, end: int) -> None:
        """What was hit is there, also if the load of it failed."""
        self._log.counts["stored_tokens"] += end - start
        self._log.add(ev.Stored(name, start, end, self.hits.get(name, 0)))
        if not self._model.prefixes[name].is_prefix(tokens):
            self.wrong_content(name, f"stores {len(tokens)} tokens that are not the first ones of the request")

    def wrong_content(self, name: str, message: str) -> None:
        self._log.violated(rules.WRONG_CONTENT, name, message)

    def right(self, name: str) -> list[int]:
        """The right contents of this request's tokens."""
        return self._model.right(name)

    def lookup_timed_out(self, name: str) -> None:
        """The scheduler has waited for it."""
        self._log.seconds += LOOKUP_TIMEOUT
        self._log.add(ev.TimedOut(name, LOOKUP_TIMEOUT, self._log.seconds))

    def lookup_unanswered(self) -> None:
        self._log.counts["lookups_unanswered"] += 1
