"""Errors and warnings of KV code that no record knows: by what their words say of it.

What the words do not prove is `not certain`.
"""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, Sign

#: Exceptions that say nothing by their class.
_PLAIN = ("RuntimeError", "Exception", "ValueError", "ConnectionError", "OSError")


def words(*texts: str) -> tuple[Sign, ...]:
    """Signs of these words, with a capital or without: in a logger's line, or in an exception of a plain class."""
    forms = [form for text in texts for form in (text, text[0].upper() + text[1:])]
    raised = (Failed(kind=kind, text=form) for form in forms for kind in _PLAIN)
    return (*(Logged(form) for form in forms), *raised)


PROBLEMS = (
    Problem(
        code="KVD340",
        name="memory-or-space-is-full",
        general=True,
        severity=Severity.SLOW,
        title="A buffer or a store has no room for what was asked: its KV is not kept, or not loaded.",
        shows=words(
            "failed to allocate",
            "no memory is available",
            "allocation failed",
            "not enough memory",
            "not enough space",
            "no space",
            "insufficient memory",
            "insufficient space",
            "exhausted",
            "is full",
        ),
        sure=False,
        cause="What is in it cannot be evicted now (pinned by lookups and loads, or being written), or one request "
        "alone needs more than all of it. If it never ends although no request runs, pins or references are leaked.",
        now="in process: a larger max_local_cpu_size (GB, for each worker; pd_buffer_size or nixl_buffer_size in "
        "bytes where the line is of those); lmcache server: --l1-size-gb; OffloadingConnector: cpu_bytes_to_use; idle "
        "and still full: restart",
        good="room for all prompts that run at once, twice over",
    ),
    Problem(
        code="KVD341",
        name="answer-in-time-is-missing",
        general=True,
        severity=Severity.HANG,
        title="Something did not answer in time.",
        shows=words("timed out", "timeout", "did not respond", "no response", "not responding"),
        sure=False,
        cause="The other side is gone, cut off, or busy for longer than the limit (a long prefill, a slow store, a "
        "thread that hangs). Its own log at this time decides.",
        now="the other side's log at this time; `kvfix look PID` on a side that runs shows what each thread waits "
        "for; if it is only slow, a larger limit (the setting that the line names)",
        good="what the other side's log says",
    ),
    Problem(
        code="KVD342",
        name="connection-is-lost",
        general=True,
        severity=Severity.HANG,
        title="A connection to another process failed or was lost.",
        shows=words(
            "disconnected",
            "connection lost",
            "lost connection",
            "failed to connect",
            "cannot connect",
            "could not connect",
            "unreachable",
            "connection failed",
            "reconnect",
        ),
        sure=False,
        cause="The other side has ended or restarted, is not up yet, or listens at another address than this side uses "
        "(localhost in a container, a name of another network).",
        now="from this side's container: nc -vz HOST PORT with the address of the line; then the other side's log; "
        "start it first",
        good="an address that this side reaches, and a start in this order",
    ),
    Problem(
        code="KVD343",
        name="memory-cannot-be-registered",
        general=True,
        severity=Severity.CRASH,
        title="Memory could not be registered or pinned for transfers.",
        shows=words("failed to register", "failed to pin", "register memory", "registration failed"),
        sure=False,
        cause="The device or the driver refuses it: more than may be locked (ulimit -l) or than one call takes, GPU "
        "memory without a peer-memory module, virtual memory (expandable segments, sleep mode), or it is registered "
        "already.",
        now="ulimit -l unlimited (--ulimit memlock=-1), lsmod | grep -e peermem -e gdr, a smaller buffer for a try, "
        "and no PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        good="the limit or the module that this decides",
    ),
    Problem(
        code="KVD344",
        name="stored-data-is-damaged",
        general=True,
        severity=Severity.WRONG,
        title="What was read back is not what was written.",
        shows=words("checksum", "corrupt", "size mismatch", "unexpected size", "truncated", "bad magic"),
        sure=False,
        cause="Its writer died in the middle, the store cut it, or it was written by another release, model or setting "
        "under the same name.",
        now="empty the store (the folder, FLUSHDB, a new bucket prefix) and restart",
        good="a store of its own for each model and release",
    ),
    Problem(
        code="KVD345",
        name="store-does-not-take-kv",
        general=True,
        severity=Severity.SLOW,
        title="KV could not be put into a store: later requests will not find it.",
        shows=words(
            "failed to put",
            "failed to store",
            "failed to write",
            "failed to save",
            "failed to upload",
            "store failed",
            "put failed",
            "put task failed",
        ),
        sure=False,
        cause="The reason stands at the line's end, or in the store's own log: no room, no permission, not reachable, "
        "or a transport that fails.",
        now="write there by hand from the worker's container (touch, redis-cli set, aws s3 cp); df -h; the store's "
        "own log at this time. Requests are answered meanwhile, without the cache",
        good="what the store's log says",
    ),
    Problem(
        code="KVD346",
        name="store-does-not-give-kv",
        general=True,
        severity=Severity.SLOW,
        title="KV that was expected in a store could not be read.",
        shows=words(
            "failed to get",
            "failed to load",
            "failed to retrieve",
            "failed to read",
            "failed to fetch",
            "failed to download",
            "retrieve failed",
            "load failed",
        ),
        sure=False,
        cause="It was evicted or deleted between lookup and load, or the store or the way to it fails: the reason "
        "stands at the line's end. What does not come is computed again.",
        now="read one key by hand from the worker's container; the store's own log at this time; with failures of "
        "every load switch the store off (remote_url, local_disk) until it is right",
        good="what the store's log says",
    ),
    Problem(
        code="KVD347",
        name="part-does-not-start",
        general=True,
        severity=Severity.CRASH,
        title="A part of the connector did not start.",
        shows=words(
            "failed to initialize",
            "initialization failed",
            "failed to init",
            "init failed",
            "failed to start",
            "failed to create",
            "not initialized",
            "setup failed",
        ),
        sure=False,
        cause="The first WARNING or ERROR of the same process before this line has the reason; if there is none, the "
        "line's own end.",
        now="grep -n -m5 -e WARNING -e ERROR -e '^E[0-9]' on the log of this process from its start; kvfix doctor -- "
        "vllm serve ... checks addresses, sizes, modules and limits",
        good="what ends that first error",
    ),
)
