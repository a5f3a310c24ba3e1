"""Hang in a connector hook. With argument `deaf`, no signal handler runs. Arguments `engine NAME` set an engine id."""

import ctypes
import signal
import sys
import threading
from types import SimpleNamespace

from kvfix import connector_events
from kvfix.config import Config
from kvfix.session import session


class Connector:
    role = SimpleNamespace(name="WORKER")

    def __init__(self) -> None:
        if sys.argv[1:2] == ["engine"]:
            self._vllm_config = SimpleNamespace(
                kv_transfer_config=SimpleNamespace(engine_id=sys.argv[2]),
                parallel_config=SimpleNamespace(rank=1, world_size=2),
            )

    def start_load_kv(self, forward_context: object) -> None:
        if sys.argv[1:] == ["deaf"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            print("hangs", flush=True)
            ctypes.PyDLL(None).sleep(120)  # PyDLL keeps the GIL during the sleep
        print("hangs", flush=True)
        threading.Event().wait(120)


session.config = Config("observe", None, None)
connector_events.watch_class(Connector)
Connector().start_load_kv(None)
