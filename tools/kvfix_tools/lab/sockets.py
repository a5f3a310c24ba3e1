"""LMCache's lookup clients made without opening a socket or starting a thread."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
#: Where LMCache opens sockets for lookups: adapters to 0.3, the transport since 0.4, asynchronous loading.
_OPENERS = ("lmcache.v1.lookup_client.lmcache_lookup_client", "lmcache.v1.rpc.zmq_transport", CLIENT)


class _Nothing:
    """A socket, a context or a thread that does nothing, whatever it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def no_sockets() -> Iterator[None]:
    """A connector made here opens no socket and starts no thread for its lookups."""
    patches = []
    for name in _OPENERS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        replaced: dict[str, Any] = {"get_zmq_socket": _Nothing, "get_zmq_context": _Nothing}
        if name == CLIENT:
            replaced["threading"] = SimpleNamespace(Thread=_Nothing, Lock=threading.Lock)
        patches += [mock.patch.object(module, key, value) for key, value in replaced.items() if hasattr(module, key)]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
