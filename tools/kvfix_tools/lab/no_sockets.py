"""LMCache's connectors made without opening a socket, starting a thread or staying when their engine is gone."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

CLIENT = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
#: Where LMCache opens sockets for lookups: adapters to 0.3, the transport since 0.4, asynchronous loading.
_OPENERS = ("lmcache.v1.lookup_client.lmcache_lookup_client", "lmcache.v1.rpc.zmq_transport", CLIENT)
#: Plugins' launchers to 0.3, and since: they have their clean-up called at the end of the process, and stay until then.
_LAUNCHERS = ("lmcache.v1.plugin.plugin_launcher", "lmcache.v1.plugin.runtime_plugin_launcher")


class _Nothing:
    """A socket, a context or a thread that does nothing, whatever it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def no_sockets() -> Iterator[None]:
    """A connector made here opens no socket, starts no thread for its lookups, and is not kept for the exit."""
    with ExitStack() as patches:
        for name in (*_OPENERS, *_LAUNCHERS):
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            replaced: dict[str, Any] = {"get_zmq_socket": _Nothing, "get_zmq_context": _Nothing, "atexit": _Nothing()}
            if name == CLIENT:
                replaced["threading"] = SimpleNamespace(Thread=_Nothing, Lock=threading.Lock)
            for key, value in replaced.items():
                if hasattr(module, key):
                    patches.enter_context(mock.patch.object(module, key, value))
        yield
