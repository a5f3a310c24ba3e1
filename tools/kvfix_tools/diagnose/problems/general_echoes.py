"""What is left where a log has only the words of those who noticed a death: what would decide it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_NO_RELEASE = "what the first error says: no setting and no release can be named by an echo"

PROBLEMS = (
    Problem(
        code="KVD1040",
        name="worker-ended-without-a-word",
        general=True,
        severity=Severity.CRASH,
        title="A worker ended, and this log has no exception of it.",
        shows=(
            Logged("died unexpectedly, shutting down executor."),
            Failed(text="died unexpectedly, shutting down executor."),
        ),
        sure=False,
        cause="A worker that raises prints a traceback first. One without was ended by a signal: SIGKILL (memory of "
        "the container or machine; older releases print no exit code), or a crash in native code; or its lines are in "
        "another file (Ray, a node of its own). `dmesg -T` of that minute decides: `Out of memory: Killed process` or "
        "`segfault at ... in libX.so`.",
        now="dmesg -T | grep -iE 'killed process|segfault' and kubectl describe pod (OOMKilled, 137); "
        "PYTHONFAULTHANDLER=1 at the next start prints the stack of a crash",
        good=_NO_RELEASE,
    ),
    Problem(
        code="KVD1101",
        name="shutdown-of-what-was-never-made",
        general=True,
        severity=Severity.CRASH,
        title="A part of the connector was shut down before it had been made: its start failed.",
        shows=(
            Failed(kind="AttributeError", text="object has no attribute '_", within="shutdown"),
            Failed(kind="AttributeError", text="object has no attribute '_", within="__del__"),
        ),
        sure=False,
        cause="Python calls shutdown() or __del__() of an object whose __init__ raised. That exception is the cause, "
        "and stands above in the same process: an assertion about the KV cache (layers, heads, layout), memory that "
        "cannot be registered, or a module that is missing. It is missing here: the excerpt begins too late.",
        now="grep -nE 'Traceback|Error: |AssertionError' LOG | head, of the worker with this process id; then "
        "kvfix-diagnose with the lines from there on",
        good=_NO_RELEASE,
        threads=("https://github.com/vllm-project/vllm/issues/33074",),
    ),
    Problem(
        code="KVD1041",
        name="only-the-echo-of-a-death",
        general=True,
        severity=Severity.CRASH,
        title="The log has only what the API server says after the engine died; the cause stands in the engine's "
        "lines.",
        shows=(
            Failed(kind="EngineDeadError"),
            Failed(text="EngineCore encountered an issue. See stack trace (above) for the root cause."),
            Failed(text="Engine core initialization failed. See root cause above."),
            Failed(text="WorkerProc initialization failed due to an exception in a background process."),
            Logged("AsyncLLM output_handler failed"),
        ),
        sure=False,
        cause="Each process prints its own traceback, before these lines: the first one of an EngineCore or a Worker "
        "is the cause. It is missing here: the excerpt begins too late, a pod was restarted, or other ranks and nodes "
        "log elsewhere.",
        now="grep -nE 'Traceback|EngineCore.*ERROR|Worker.*ERROR' LOG | head; kubectl logs --previous, docker logs, "
        "Ray's /tmp/ray/session_latest/logs; then kvfix-diagnose with all of these files",
        good=_NO_RELEASE,
    ),
    Problem(
        code="KVD1103",
        name="proxy-hands-on-an-engine-s-error",
        general=True,
        severity=Severity.CRASH,
        title="A proxy in front of prefill and decode got an error as the engine's answer.",
        shows=(
            Failed(kind="HTTPStatusError", text="Server error '5<code>"),
            Failed(kind="ClientResponseError", text="5<code>, message="),
            Failed(kind="RemoteProtocolError", text="peer closed connection without sending complete message body"),
            Failed(kind="RemoteProtocolError", text="Server disconnected without sending a response"),
        ),
        sure=False,
        cause="The proxy is not the one that failed: the engine whose address is in the line answered 500, or ended "
        "in the middle of its answer. Prefill's address: the first half (LMCache, NIXL or Mooncake on the sender); "
        "decode's: a transfer that did not come. A 500 of each request is a set-up, one after hours a crash.",
        now="curl that address (/health); kubectl logs --previous or docker logs of that engine at this minute, then "
        "kvfix-diagnose with them; the request by hand to that engine shows its answer",
        good=_NO_RELEASE,
        threads=("https://github.com/kvcache-ai/Mooncake/issues/960",),
    ),
    Problem(
        code="KVD1552",
        name="connector-not-closed-at-the-end",
        general=True,
        severity=Severity.RISK,
        title="The engine ends or did not start, and a part of its connector could not be closed.",
        shows=(
            Logged("NIXL dlist-handle release failed at shutdown."),
            Logged("NIXL remote-engine cleanup failed at shutdown."),
            Logged("Failed to shut down store offloading handler"),
            Logged("Failed to shut down load offloading handler"),
            Logged("Failed to synchronize transfer end event; skipping <count> remaining transfers"),
            Logged("Failed to shut down secondary tier"),
            Logged("Failed to shut down primary tier during initialization cleanup"),
            Logged("Failed to clean up scheduler mmap during initialization cleanup"),
        ),
        sure=False,
        cause="It is a consequence: after a CUDA error every later call of CUDA fails too, after a failed start the "
        "parts are half made. `during initialization cleanup` follows a start that failed; the others come while the "
        "engine shuts down. The first error of this process, above, is the cause, and missing here.",
        now="grep -nE 'Traceback|Error: |AssertionError' LOG | head, of the process with this id; after the end, "
        "`ls -lh /dev/shm` and remove what a dead engine left (vllm_offload_*)",
        good=_NO_RELEASE,
    ),
)
