"""The connection between LMCache's adapters and a real server: a delayed client."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.connectors.server_process import PATIENCE

if TYPE_CHECKING:
    from kvfix_tools.lab.connectors.mp_real import RealServer


class RequestId(str):
    """The id of a request of the lab."""


class Client:
    """LMCache's client. The lab waits for each answer. While the adapter waits, the lab's time passes."""

    def __init__(self, server: RealServer, client: Any) -> None:
        self._server = server
        self._client = client
        self._message_queue_client = client._message_queue_client

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return functools.partial(self.send, operation)

    def send(self, operation: str, *arguments: Any, **more: Any) -> Any:
        """Return a future with the answer, unless the server is stopped."""
        future = getattr(self._client, operation)(*map(self._server.named, arguments), **more)
        if not (self._server.down or future.wait(PATIENCE)):
            raise RuntimeError(f"the server does not answer {operation}: ... {self._server.process.log[-1500:]}")
        return future

    def lookup(self, key: Any, tp_size: int) -> Any:
        return self._server.look(self, key, lambda: self.send("lookup", key, tp_size).result())

    def query_prefetch_status(self, request_id: str) -> Any:
        """Wait for the answer, because it is not known how many steps the server needs to read from its disk."""
        answer = self.send("wait_prefetch_status", RequestId(request_id), PATIENCE)
        self._server.found(request_id, answer.result())
        return answer

    def end_session(self, request_id: str) -> Any:
        return self.send("end_session", RequestId(request_id))

    def clear(self, force: bool = False) -> Any:
        """Clear the server's L1, and its disk, which the server does not clear (KVF121)."""
        self._server.empty_disk()
        return self.send("clear", force)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Any:
        self._server.released(key)
        return self.send("free_lookup_locks", key, tp_size)

    def store(self, key: Any, worker: int, blocks: list[list[int]], event: bytes) -> Any:
        blocks = [list(group) for group in blocks]  # a copy: the list may change before the transfer ends
        return self._server.store(key, blocks, lambda: self.send("store", key, worker, blocks, event).result())

    def retrieve(self, key: Any, worker: int, blocks: list[list[int]], event: bytes, skip: int) -> Any:
        arguments = (key, worker, [list(group) for group in blocks], event, skip)
        return self._server.retrieve(key, lambda: self.send("retrieve", *arguments).result())

    def close(self) -> None:
        self._client.close()
