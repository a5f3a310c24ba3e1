"""A finding about stacks of gdb, which show threads in native code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.stacks import NATIVE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Patterns of transport libraries in file or function names, and of their progress threads, which never wait for a
#: peer.
_TRANSPORTS = re.compile(r"(?i)nixl|libuc[pst]\b|libuc[pst]-|\buc[pst]_|mooncake|libfabric|ibverbs|libmlx5|nccl")
_PROGRESS = re.compile(r"(?i)progress(?:func|thread|_thread)|poll_?thread|async_thread|workerThread|epoll_loop")


@finding("KVD1303", "stands-in-transport", Severity.HANG, on=["stack"])
def stands_in_transport(log: Diagnosis, line: LogLine) -> Answer | None:
    """The engine may hang: a stack of gdb shows a thread inside a transport library.

    Cause: one stack does not show how long the thread has been there. Take three stacks, some seconds apart (`gdb -p
    PID -batch -ex 'thread apply all bt'`). If they are equal, the thread waits for a peer, for the registration of
    memory, or for a lock that another thread holds.

    Setting: `kvfix dump PID` saves the Python stacks of the process. Then read the peer's log of this time, which
    decides.
    """
    fields = line.fields
    frames = fields["frames"]
    if log.failures.dead or fields["state"] != NATIVE or any(_PROGRESS.search(frame[2]) for frame in frames):
        return None
    inner = next((frame for frame in reversed(frames) if _TRANSPORTS.search(f"{frame[0]} {frame[2]}")), None)
    if inner is None:
        return None
    thread = fields["thread"] or "a thread"
    where = f" ({inner[0].rpartition('/')[2]})" if inner[0] else ""
    return Answer(f"{thread} is in {frames[-1][2]}, called from {inner[2]}{where}", verdict="unknown")
