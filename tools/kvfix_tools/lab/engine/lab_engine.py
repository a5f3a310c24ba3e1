"""The lab's engine. Each step of a schedule is a method: actions of clients and other engines, faults, expectations."""

import time
from contextlib import suppress
from typing import Any

from vllm.v1.core.sched import interface
from vllm.v1.request import RequestStatus

from kvfix.ledger import events as ev
from kvfix_tools.lab.engine import rules, vllm_objects
from kvfix_tools.lab.engine.engine_core import EngineCore
from kvfix_tools.lab.engine.engine_core import EngineDied as EngineDied

#: A run ends after so many steps without an event. Lookups and loads of the lab take fewer steps.
IDLE = 64


class LabEngine(EngineCore):
    def do(self, step: str, *arguments: Any, **keywords: Any) -> None:
        """Make the step of this name: a method of this class or of the connector."""
        getattr(self if hasattr(self, step) else self.connector, step)(*arguments, **keywords)

    # ------------------------------------------------------------------ requests

    def admit(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """A request arrives. more: arguments of vllm_objects.request."""
        request = vllm_objects.request(self.options, name, prompt, max_tokens, **more)
        self.counts["ids_used_again"] += name in self.requests
        self.model.admit(name, request)
        self.request_events.admitted(name)
        self._guard("add_request", name, self.scheduler.add_request, request)

    def add_input(self, name: str, prompt: list[int], max_tokens: int = 1) -> None:
        """A session, a request that was admitted as `resumable`, gets more input."""
        self.counts["inputs"] += 1
        more = vllm_objects.request(self.options, name, prompt, max_tokens, resumable=True)
        self._guard("add_request", name, self.scheduler.add_request, more)
        self.model.take_input()

    def serve(self, name: str, prompt: list[int] | None, max_tokens: int = 1, **more: Any) -> None:
        """A request arrives, and the engine runs until it has no work."""
        self.admit(name, prompt, max_tokens, **more)
        self.run()

    def store(self, name: str, prompt: list[int], max_tokens: int = 1, **more: Any) -> None:
        """Run a request to its end, so that its prompt is stored. Then empty vLLM's own prefix cache."""
        self.serve(name, prompt, max_tokens, **more)
        self.reset_prefix_cache()

    def end_input(self, name: str) -> None:
        """A session gets no more input. It ends at once if it waits for input."""
        self._guard("add_request", name, self.scheduler.add_request, vllm_objects.request(self.options, name, [1], 1))
        if self.requests[name].is_finished():
            self.request_events.check_text(name)
            self.request_events.aborted(name, set())

    def pause(self, everything: bool = False) -> None:
        """Schedule no new request, or no request at all, until `unpause` (`pause_scheduler` of EngineCore)."""
        self.counts["pauses"] += 1
        states = interface.PauseState
        self.scheduler.set_pause_state(states.PAUSED_ALL if everything else states.PAUSED_NEW)

    def unpause(self) -> None:
        """Undo `pause`."""
        self.scheduler.set_pause_state(interface.PauseState.UNPAUSED)

    def is_free(self, name: str) -> bool:
        """Return True if no request has this id, or it has ended, and scheduler and worker know that."""
        known = self.requests.get(name)
        if known is None or any(name in output.num_scheduled_tokens for output, _ in self._answers):
            return known is None
        return known.is_finished() and name not in self.scheduler.requests and not self.scheduler.finished_req_ids

    def preempt(self, name: str) -> None:
        """Preempt this running request, as vLLM does when an earlier request needs a block."""
        request = self.requests[name]
        self.scheduler.running.remove(request)
        vllm_objects.preempt(self.scheduler, request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(name)  # as vLLM does where it preempts between steps
        self.request_events.preempted()

    # ------------------------------------------------------------------ memory

    def budget(self, tokens: int) -> None:
        """Limit the scheduled tokens of each later step."""
        self.scheduler.max_num_scheduled_tokens = tokens

    def keep_blocks(self, how_many: int) -> None:
        """Take free blocks until only `how_many` are free. A cached prefix loses its end first."""
        self.take_blocks(self.free() - how_many)

    def take_blocks(self, how_many: int) -> None:
        """Take so many free blocks and write to them. `free_blocks` gives them back."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(min(how_many, self.free()))
        numbers = [block.block_id for block in taken]
        self.model.written_by_others += numbers
        if self.connector.offloading is not None:
            self.connector.offloading.others_take(numbers)
        self._held += taken

    def free_blocks(self) -> None:
        self.scheduler.kv_cache_manager.block_pool.free_blocks(self._held)
        self._held, self.model.written_by_others = [], []

    def reset_prefix_cache(self, running: bool = False) -> None:
        """Reset vLLM's prefix cache, if no blocks are in use. running: preempt the running requests first."""
        self.counts["resets"] += 1
        self.counts["resets_while_running"] += bool(running and self.scheduler.running)
        _ = self._reset(True) if running else self._reset()

    def new_weights(self) -> None:
        """Change the weights and reset all KV, also the connector's. If the reset answers False, keep the weights."""
        self.counts["connector_resets"] += 1
        if self._reset(True, True):
            self.model.change_weights()

    def _reset(self, *running_and_connector: bool) -> bool:
        """Return the answer of vLLM, which raises if a waiting request has blocks (scheduler.py 0.32.0:2870)."""
        done = False
        with suppress(RuntimeError):
            done = self.scheduler.reset_prefix_cache(*running_and_connector)
        self.request_events.preempted()
        return done

    def has_in_other_connector(self, name: str) -> None:
        """Give the other connector of a MultiConnector the KV of this request."""
        self.connector.other.has.add(name)

    def evict(self, chunks: int, forced: bool = False, rank: int = 0) -> None:
        """Evict the oldest chunks. forced: also pinned ones, as when a pin times out. rank: whose cache, in process."""
        evicted = self.connector.evict(self.caches[rank], chunks, forced)
        self.counts["evicted_pinned" if forced else "evicted"] += evicted
        if evicted and forced:
            self.request_events.may_fail.add("")

    # ------------------------------------------------------------------ faults

    def fail_load(self, name: str, after_chunks: int = 0, rank: int = 0) -> None:
        """Let the next load of this request bring only `after_chunks` chunks, in this rank."""
        self.workers[rank].failing[name] = after_chunks
        self.request_events.may_fail.add(name)

    def lose_loads(self, *ranks: int) -> None:
        """Make a step in which the server does not answer these workers: their loads fail. Default: all ranks."""
        self.request_events.may_fail.add("")
        for worker in self.workers:
            worker.unanswered = not ranks or worker.rank in ranks
        self.step()

    # ------------------------------------------------------------------ time

    def step(self, times: int = 1) -> None:
        """Make so many iterations of EngineCore."""
        for _ in range(times):
            self.iterate()

    def run(self, steps: int = 1000) -> None:
        """Make steps until the engine has no work, for at most `steps` steps, or until IDLE steps without an event."""
        self.idle = 0
        for _ in range(steps):
            if not self.scheduler.has_requests() or self.idle > IDLE:
                return
            self.step()

    def run_until_finished(self, name: str) -> None:
        """Make steps until this request has ended."""
        while not self.requests[name].is_finished():
            self.step()

    # ------------------------------------------------------------------ expectations

    def settle(self) -> None:
        """After the end of all requests: make two more steps, then expect that no state of them is kept."""
        self.step(2)
        for _ in range(IDLE):  # a transfer in flight holds its blocks
            if not self.scheduler.requests and not self.connector.busy():
                break
            self.step()
        self.request_events.leaked()
        self.connector.never_given_back()

    def expect_all_ended(self) -> bool:
        """After many steps with free blocks: expect that every request has ended and that no state of it is kept."""
        # a paused scheduler reports no unfinished requests
        if not all(request.is_finished() for request in self.requests.values()):
            self.request_events.never_end()
            return False
        self.settle()
        return True

    def expect_stored(self, name: str) -> None:
        """Expect that the cache has each whole chunk of this request's prompt."""
        missing = self.connector.not_stored(self.requests[name])
        if missing:
            message = f"was computed, the chunks from tokens {missing} on are not stored"
            self.request_events.violated(rules.NOT_STORED, name, message)

    def expect_forgotten(self, name: str) -> None:
        """Expect that no state of this request is kept, long after its end."""
        for where, names in {**self.connector.kept(), **self.connector.kept_for_a_while()}.items():
            if name in names:
                self.request_events.add(ev.Left(name, where))

    def expect_hit(self, name: str) -> None:
        if not self.request_events.hits.get(name):
            self.request_events.violated(rules.NOT_FOUND, name, "is in the cache and was not found there")

    def expect_unharmed(self, name: str) -> None:
        """Expect that this request did not end with an error: none of its own loads failed."""
        status = self.requests[name].status
        if status == RequestStatus.FINISHED_ERROR:
            self.request_events.violated(rules.HARMED_BY_OTHERS, name, f"ended as {status.name}")
