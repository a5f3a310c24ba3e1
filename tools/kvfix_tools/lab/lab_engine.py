"""The lab's engine: EngineCore, moved by named steps. A scenario's schedule names them (steps.py)."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.request import RequestStatus

from kvfix.ledger import events as ev
from kvfix_tools.lab import rules, vllm_objects
from kvfix_tools.lab.engine_core import EngineCore, EngineDied
from kvfix_tools.lab.options import Options

__all__ = ["EngineDied", "LabEngine"]

#: After so many steps in which nothing happened, nothing will: longer than any lookup or load of the lab takes.
IDLE = 64
#: Steps that `settle` waits for transfers.
TRANSFERS = 64
#: What an aborted request was in, apart from its transfers.
_STATE = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
}


class LabEngine(EngineCore):
    """The steps. What happened is in `log`, `findings` and `counts`."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        #: Blocks that others have taken.
        self._held: list[Any] = []

    # ------------------------------------------------------------------ requests

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """A request arrives. more: of vllm_objects.request."""
        request = vllm_objects.request(self.options, name, prompt, max_tokens, **more)
        self.counts["ids_used_again"] += name in self.requests
        self.model.admit(name, request)
        self.request_events.admitted(name)
        self.scheduler.add_request(request)

    def is_free(self, name: str) -> bool:
        """Whether a request of this id may arrive: none has, or it is gone and scheduler and worker know it."""
        known = self.requests.get(name)
        if known is None:
            return True
        return known.is_finished() and name not in self.scheduler.requests and not self.scheduler.finished_req_ids

    def abort(self, name: str) -> None:
        """The client is gone."""
        request = self.requests[name]
        doing = {_STATE[request.status], *self.connector.in_flight(name)} if request.status in _STATE else set()
        self.guard("finish_requests", name, self.scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)
        if request.is_finished():
            self.request_events.aborted(name, doing)

    def preempt(self, name: str) -> None:
        """vLLM takes the blocks of this running request, as it does when one before it needs a block."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        vllm_objects.preempt(self.scheduler, request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(name)  # as vLLM does where it preempts between steps
        self.request_events.preempted()

    # ------------------------------------------------------------------ blocks of vLLM

    def budget(self, tokens: int) -> None:
        """From the next step on, at most so many tokens are scheduled in one."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def keep_blocks(self, how_many: int) -> None:
        """Others take all free blocks but so many; a cached prefix loses its end first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Others need blocks and write to them: so many of the free ones are gone until `free_blocks`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        self.model.written_by_others += [block.block_id for block in taken]
        self._held += taken

    def free_blocks(self) -> None:
        """The blocks of `take_blocks` come free."""
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self.model.written_by_others = [], []

    def reset_prefix_cache(self) -> None:
        """vLLM forgets its own prefix cache, if no blocks are in use."""
        self.counts["resets"] += 1
        self.scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------ the external cache

    def stored_elsewhere(self, prompt: list[int]) -> None:
        """Another instance has stored this prompt in the cache, whole chunks of it."""
        self.connector.put(prompt)

    def has_in_other_connector(self, name: str) -> None:
        """The other connector of a MultiConnector has the KV of this request."""
        self.other_connector.has.add(name)

    def evict(self, chunks: int, forced: bool = False) -> None:
        """The cache drops its oldest chunks; `forced`: also those that a lookup has pinned, as when a pin times out."""
        gone = self.cache.evict(chunks, forced)
        self.counts["evicted_pinned" if forced else "evicted"] += gone
        if gone and forced:
            self.request_events.may_fail.add("")

    def fail_load(self, name: str, after_chunks: int = 0) -> None:
        """The next load of this request brings only so many chunks."""
        self.connector.fail_load(name, after_chunks)
        self.request_events.may_fail.add(name)

    def lose_loads(self) -> None:
        """A step in which the worker of a multi-process connector hears nothing from its server: its loads fail."""
        self.request_events.may_fail.add("")
        self.connector.lose_loads()
        self.step()

    def lookup_times_out(self) -> None:
        """A lookup of the multi-process scheduler was not answered in time: it takes the server for gone."""
        self.connector.lookup_times_out()

    def hour_of_silence(self) -> None:
        """Nothing is asked for an hour; the multi-process server forgets a worker that has never pinged."""
        self.connector.transfer.forget_silent_worker()

    def lookups_fail(self, how_many: int) -> None:
        """So many of the next lookups time out, which is answered as no hit. It takes the lab's time only."""
        self.connector.lookups_fail(how_many)

    def slow_lookups(self, steps: int) -> None:
        """Asynchronous lookups made from now on are answered so many steps later than they could be."""
        self.connector.cache_engine.delay = steps

    def wait(self, seconds: float) -> None:
        """So much time passes for asynchronous lookups, which give up after `lookup_timeout_ms`."""
        self.connector.lookups.wait(seconds)

    # ------------------------------------------------------------------ time

    def step(self, times: int = 1) -> None:
        """So many iterations of EngineCore."""
        for _ in range(times):
            self.iterate()

    def run(self, steps: int = 1000) -> None:
        """Step until nothing is to be done, at most so often; or until nothing has happened for IDLE steps."""
        self.idle = 0
        for _ in range(steps):
            if not self.scheduler.has_requests() or self.idle > IDLE:
                return
            self.step()

    def run_until_finished(self, name: str) -> None:
        """Step until this request has ended."""
        while not self.requests[name].is_finished():
            self.step()

    def settle(self) -> None:
        """All requests have ended: two more steps let the connector clean up, then nothing may be kept of them."""
        self.step(2)
        for _ in range(TRANSFERS):  # a transfer in flight holds its blocks
            if not self.scheduler.requests and not self.connector.busy():
                break
            self.step()
        self.request_events.leaked()

    # ------------------------------------------------------------------ what must have come of it

    def expect_all_ended(self) -> bool:
        """All is free, many steps were made: every request has ended, and nothing is kept of it."""
        if self.scheduler.has_unfinished_requests():
            self.request_events.never_end()
            return False
        self.settle()
        return True

    def expect_stored(self, name: str) -> None:
        """All of this request's prompt was computed: each whole chunk of it must be in the cache."""
        missing = self.connector.not_stored(self.requests[name])
        if missing:
            message = f"was computed, the chunks from tokens {missing} on are not stored"
            self.run_log.violated(rules.NOT_STORED, name, message)

    def expect_forgotten(self, name: str) -> None:
        """This request ended long ago, and many have since: nothing is kept of it."""
        for where, names in {**self.connector.kept(), **self.connector.kept_for_a_while()}.items():
            if name in names:
                self.run_log.add(ev.Left(name, where))

    def expect_hit(self, name: str) -> None:
        """What this request asks for is in the cache: it must have been found."""
        if not self.request_events.hits.get(name):
            self.run_log.violated(rules.NOT_FOUND, name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """No load of this request's own failed: if it has ended, then with an answer."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self.run_log.violated(rules.HARMED_BY_OTHERS, name, f"ended as {status.name}")
