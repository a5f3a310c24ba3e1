"""In place of the transfer between vLLM's KV memory and the server: it copies between the lab's slots and chunks."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfix_tools.lab.memory import Slots
from kvfix_tools.lab.mp_server import Server

if TYPE_CHECKING:
    from kvfix_tools.lab.request_events import RequestEvents


class Transfer:
    """The transfer context of the worker's adapter, under its own names. Each load and store goes to `events`."""

    events: RequestEvents

    def __init__(self, server: Server, slots: Slots) -> None:
        self.server = server
        self.slots = slots
        self.flushes = _flushes()
        #: Whether the server knows the worker's KV memory.
        self.registered = True
        self.failing: dict[str, int] = {}
        self.loading: set[str] = set()
        #: request -> stores in flight
        self.storing: Counter[str] = Counter()

    def lose_loads(self, unheard: set[str]) -> None:
        """Loads in flight are never done, those of `unheard` were for nothing; stores and lookups are done at once."""
        self.server.drop_loads()
        for name in sorted(self.loading | unheard):
            self.server.cache.unpin(name)
            self.events.loaded(name, 0, 0)
        self.loading.clear()

    def forget_silent_worker(self) -> None:
        """As the server does when `worker_registration_grace_seconds` are over, in releases that have it."""
        self.registered = not _forgets() or any(heartbeat.is_of_worker for heartbeat in self.server.heartbeats)

    def register(self, *args: Any, **more: Any) -> None:
        self.registered = True

    def create_recorded_event(self) -> Any:
        return None

    def flush_inflight_stores(self, *args: Any, **more: Any) -> None:
        """All that is in flight is done before this returns, in releases whose transfer on CUDA waits for it at all.

        (LMCacheDrivenTransferContext, what LMCache chooses on CUDA, does nothing here up to 0.5.5.)
        """
        if self.flushes:
            self.server.finish()

    def submit_store(self, request_id: str, key: Any, *rest: Any, **more: Any) -> Any:
        blocks = _block_ids(rest)
        self.events.stored(request_id, list(key.token_ids), key.start, key.end)

        self.storing[request_id] += 1

        def store() -> bool:
            self.storing[request_id] -= 1
            if not self.registered:
                return False
            keys, _ = self.server.keys(key.token_ids, key.end, key.cache_salt)
            right = self.events.right(request_id)
            for number in range(key.start // self.server.chunk_size, len(keys)):
                begin = number * self.server.chunk_size
                read = [self.slots.get(slot) for slot in self._slots(blocks, begin - key.start)]
                if read != right[begin : begin + self.server.chunk_size]:
                    self.events.wrong_content(
                        request_id, f"other KV than that of tokens {begin} on is stored under their key"
                    )
                self.server.cache.put(keys[number], read)
            return True

        return self.server.later(store)

    def submit_retrieve(self, request_id: str, key: Any, *rest: Any, skip_first_n_tokens: int = 0, **more: Any) -> Any:
        blocks = _block_ids(rest)
        self.loading.add(request_id)

        def load() -> bool:
            self.loading.discard(request_id)
            keys, _ = self.server.keys(key.token_ids, key.end, key.cache_salt)
            wanted = keys[key.start // self.server.chunk_size :]
            found = [self.server.cache.get(each) for each in wanted]
            self.server.unlock(request_id, wanted)
            if request_id in self.failing or None in found or not self.registered:
                self.failing.pop(request_id, None)
                self.events.loaded(request_id, 0, 0)
                return False
            for number, contents in enumerate(found):
                offset = number * self.server.chunk_size
                for index, slot in enumerate(self._slots(blocks, offset)):
                    if offset + index >= skip_first_n_tokens and contents is not None:
                        self.slots.put(slot, contents[index])
            self.events.loaded(request_id, key.end, key.end - key.start)
            return True

        return self.server.later(load, is_load=True)

    def _slots(self, blocks: list[int], offset: int) -> list[int]:
        size = self.slots.block_size
        positions = range(offset, offset + self.server.chunk_size)
        return [blocks[position // size] * size + position % size for position in positions]


def _block_ids(arguments: tuple[Any, ...]) -> list[int]:
    """The blocks of the one KV cache group among a transfer's arguments: their place and nesting differ by release."""
    found: list[Any] = next(argument for argument in arguments if isinstance(argument, list))
    return found[0] if found and isinstance(found[0], list) else found


def _source(module: str) -> str:
    """Of a module of the installed LMCache, which is not imported; "" if it has none."""
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        return ""
    return Path(found.origin).read_text(encoding="utf-8") if found is not None and found.origin else ""


@functools.cache
def _forgets() -> bool:
    """Whether the installed release's server forgets workers that are silent: since 0.5.0."""
    return "worker_registration_grace_seconds" in _source("lmcache.v1.multiprocess.config")


@functools.cache
def _flushes() -> bool:
    """Whether the installed release's transfer on CUDA has more than `pass` where it should wait for its stores."""
    for node in ast.walk(ast.parse(_source("lmcache.v1.multiprocess.transfer_context.worker_transfer"))):
        if isinstance(node, ast.ClassDef) and node.name == "LMCacheDrivenTransferContext":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "flush_inflight_stores":
                    return any(not isinstance(line, ast.Pass | ast.Expr) for line in method.body)
    return False
