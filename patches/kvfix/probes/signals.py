"""The recorder on demand: SIGUSR2, if nobody else has it, and at exit with KVFIX_DUMP_AT_EXIT=1.

Nothing is logged from the handler: it may have interrupted a log line.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from kvfix import notice
from kvfix.probes import alarm, dump

AT_EXIT = "KVFIX_DUMP_AT_EXIT"
SIGNAL = signal.SIGUSR2

_installed = False


def install() -> None:
    """Once, in the process that has a connector, from its main thread (else Python does not let us)."""
    global _installed
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    _installed = True
    if os.environ.get(AT_EXIT, "") not in ("", "0"):
        atexit.register(_at_exit)
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, _on_signal):
        signal.signal(SIGNAL, _on_signal)
        _announce()


def belongs() -> None:
    """A connector has been made: say which engine this process is of."""
    if _installed and signal.getsignal(SIGNAL) is _on_signal:
        _announce()


def _announce() -> None:
    try:
        dump.announce()
    except OSError as error:
        alarm.cannot_write(error)
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.probes.signals", error)


def remove() -> None:
    """The signal is free again, if it is still ours."""
    global _installed
    if not _installed or threading.current_thread() is not threading.main_thread():
        return
    _installed = False
    if signal.getsignal(SIGNAL) is _on_signal:
        signal.signal(SIGNAL, signal.SIG_DFL)
    atexit.unregister(_at_exit)
    dump.withdraw()


def _on_signal(number: int, frame: Any) -> None:
    with suppress(Exception):  # it may stand in the middle of anything
        dump.write("signal")


def _at_exit() -> None:
    try:
        dump.write("exit")
    except OSError as error:
        alarm.cannot_write(error)
    except Exception as error:  # noqa: BLE001
        notice.fault("kvfix.probes.signals", error)


def _in_child() -> None:
    """A fork has the handler of its parent, and has not said so."""
    global _installed
    _installed = False
    atexit.unregister(_at_exit)


os.register_at_fork(after_in_child=_in_child)
