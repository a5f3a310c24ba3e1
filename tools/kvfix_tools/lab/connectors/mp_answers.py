"""The answers of the lab's multi-process server: futures that end some steps later, and heartbeats.

An action ends `delay` steps after its request, or at once.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvfix_tools.lab.options import Options


class Heartbeat:
    """Replaces LMCache's HeartbeatThread: one heartbeat in each step."""

    def __init__(self, server: Answers, health_event: Any, instance_id: int | None = None, **more: Any) -> None:
        self._server = server
        self._event = health_event
        self.is_of_worker = instance_id is not None
        self.stop_requested = False
        self._recover: Callable[[], bool] = lambda: True

    def register_recover_callback(self, callback: Callable[[], bool]) -> None:
        self._recover = callback

    def start(self) -> None:
        self._server.heartbeats.append(self)

    def stop(self, *_: Any, **__: Any) -> None:
        self.stop_requested = True

    def beat(self) -> None:
        if self._server.down:
            self._event.clear()
        elif not self._event.is_set() and self._recover():
            self._event.set()


def _client_without_socket() -> Any:
    """Return LMCache's client of 0.5.6 and later, without its socket: the lab needs its code for a new connection."""
    try:
        from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient
    except ImportError:
        return None
    client = MessageQueueClient.__new__(MessageQueueClient)
    vars(client).update(pending_futures={}, pending_streams={}, socket=SimpleNamespace(recv_multipart=list))
    client.process_inbound()
    return client


class Due(NamedTuple):
    """An action of the server, its step, and its answer.

    load: (rank, request) of a load. late: the action to do instead if the worker has dropped the load.
    """

    step: int
    action: Callable[[], Any]
    load: tuple[int, str] | None = None
    late: Callable[[], Any] | None = None


class Answers:
    """The actions of the server, and their futures."""

    def __init__(self, options: Options) -> None:
        from lmcache.v1.multiprocess.futures import MessagingFuture

        server = self

        class Future(MessagingFuture):  # type: ignore[misc]
            """Let time pass: do the actions in flight in their order until this future has its answer."""

            def wait(self, timeout: float | None = None) -> bool:
                while not self.query() and server._later and not server.down:
                    server._later.popleft().action()
                return bool(super().wait(0))

            def to_cuda_future(self, device: Any = None) -> Any:
                """Return the future itself: a transfer of the lab ends with its future."""
                return self

        self._future = Future
        self._delay = options.delay
        self._rank_delay = options.rank_delay
        self._now = 0
        #: Sorted by the step in which an action is due.
        self._later: deque[Due] = deque()
        self._message_queue_client = _client_without_socket()
        #: True: the server does nothing, and answers no heartbeat.
        self.down = False
        self.heartbeats: list[Heartbeat] = []
        #: A client has lost its connection since the last step.
        self.was_disconnected = False

    def tick(self) -> None:
        """Begin a step of the engine: do the actions that are due."""
        self._now += 1
        for heartbeat in self.heartbeats:
            heartbeat.beat()
        self.was_disconnected = False
        while self._later and self._later[0].step <= self._now and not self.down:
            self._later.popleft().action()

    @property
    def busy(self) -> int:
        return len(self._later)

    def _answer(self, result: Any) -> Any:
        future = self._future()
        future.set_result(result)
        return future

    def _answer_later(self, action: Callable[[], Any], rank: int = 0, **of_load: Any) -> Any:
        """Return a future of `action`, which runs when it is due. of_load: `load` and `late` of `Due`."""
        delay = self._delay + rank * self._rank_delay
        if not (delay or self.down):
            return self._answer(action())
        future = self._future()
        due = Due(self._now + delay, lambda: future.set_result(action()), **of_load)
        self._later.insert(bisect.bisect_right(self._later, due.step, key=lambda each: each.step), due)
        return future

    @contextmanager
    def disconnected(self, client: Any) -> Iterator[None]:
        """In this context the client has lost its connection, as if its thread had found this out."""
        queue = getattr(client, "_message_queue_client", None)
        if queue is not None:
            self.was_disconnected = True
            queue.cancel_streams()
        yield
        if queue is not None:
            self._answer_something(client)

    def _answer_something(self, client: Any) -> None:
        client._message_queue_client.process_inbound()
