"""Stacks of gdb's: where a process stands in native code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.stacks import NATIVE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Libraries of transports, by their files or in their functions' names; and what only turns their wheels.
_TRANSPORTS = re.compile(r"(?i)nixl|libuc[pst]\b|libuc[pst]-|\buc[pst]_|mooncake|libfabric|ibverbs|libmlx5|nccl")
_WHEELS = re.compile(r"(?i)progress(?:func|thread|_thread)|poll_?thread|async_thread|workerThread|epoll_loop")


@finding("KVD1303", "stands-in-transport", Severity.HANG, on=["stack"])
def stands_in_transport(log: Diagnosis, line: LogLine) -> Answer | None:
    """A stack of gdb's shows a thread inside a transport's library.

    Cause: a stack shows where it is, not how long: take three, some seconds apart (`gdb -p PID -batch -ex 'thread apply
    all bt'`). If they are the same, it waits there: for a peer that is gone, for memory that is being registered, or
    for a lock that another thread of this dump holds.

    Setting: `kvfix dump PID` takes the Python stacks of the same process. The log of the peer at this time decides.
    """
    fields = line.fields
    frames = fields["frames"]
    if log.failures.dead or fields["state"] != NATIVE or any(_WHEELS.search(frame[2]) for frame in frames):
        return None
    inner = next((frame for frame in reversed(frames) if _TRANSPORTS.search(f"{frame[0]} {frame[2]}")), None)
    if inner is None:
        return None
    thread = fields["thread"] or "a thread"
    where = f" ({inner[0].rpartition('/')[2]})" if inner[0] else ""
    return Answer(f"{thread} is in {frames[-1][2]}, called from {inner[2]}{where}", verdict="unknown")
