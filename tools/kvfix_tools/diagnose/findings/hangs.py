"""Findings about an engine that makes no progress, without a crash."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.stacks import NATIVE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Fields, LogLine


#: After this number of equal answers without an admission, a request counts as stuck.
POLLS = 1000


class _Head:
    """The request that vLLM asks about now: its fields, and the counts of lookups and transfers at its first lookup."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.asked = self.done = 0


@finding("KVD201", "asked-for-ever", Severity.HANG, on=["asked"])
def asked_for_ever(log: Diagnosis, line: LogLine) -> Answer | None:
    """All requests wait: vLLM asks about one request in every step, and never schedules it.

    Cause: the first request of the queue gets no blocks, because its load needs more blocks than are ever free, or
    vLLM can never grant its promise. All requests behind it wait too.

    Setting: `--num-gpu-blocks-override` or `--gpu-memory-utilization` higher, for more KV blocks. Or lower
    `--max-model-len` or `--max-num-seqs`, or unset `max_tokens_per_load`.
    """
    f = line.fields
    done = log.counts["stored"] + log.counts["retrieved"]
    asked = log.counts["asked"]
    head = log.state(_Head)
    if not head.fields or head.done != done or (head.fields is not f and _answer(head.fields) != _answer(f)):
        # vLLM asks about another request, or the engine works: vLLM asks in every step of a busy engine too.
        head.fields, head.asked, head.done = f, asked, done
        return None
    statistics = log.last.get("stats")
    moving = float(statistics.fields["generation"]) if statistics is not None else None
    if moving or asked - head.asked < (POLLS if moving is not None else 5 * POLLS):
        return None
    head.asked = asked
    return Answer(
        f"asked at least {POLLS} times in a row with the same answer: hit {f.get('hit')}, need to load {f.get('need')}"
        + ("" if moving is not None else "; the engine may be busy, because the log has no statistics of vLLM"),
        verdict="unknown" if moving is None else "violated",
    )


def _answer(fields: Fields) -> tuple[Any, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@finding("KVD203", "lookups-not-answered", Severity.HANG, on=["lookup_timeout"], symptom=True)
def lookups_not_answered(log: Diagnosis, line: LogLine) -> Answer | None:
    """The engine is slow or stands still: workers do not answer lookups, and each step waits for a lookup's timeout.

    Setting: `lookup_timeout_ms` shorter, and find out why the worker's LMCache does not answer (KVD207).
    """
    if log.counts["lookup_timeout"] < 3:
        return None
    rank = line.fields["rank"]
    elsewhere = "; a rank on another node never answers: lookup_server_worker_ids: [0] asks rank 0"
    return Answer(f"rank {rank} did not answer a lookup in time{elsewhere if rank != '0' else ''}")


@finding("KVD207", "worker-without-lmcache", Severity.HANG, on=["degraded"])
def worker_without_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    """Each step waits for a lookup timeout, because LMCache failed to start in a worker.

    Cause: the line shows why LMCache failed to start. The worker continues without LMCache, and answers no lookup. The
    scheduler does not know this.

    First: `grep -n 'LMCache ERROR' LOG | head` shows the error at the start. Fix it, and restart.
    """
    f = line.fields
    if "what" in f and f["error"]:
        return Answer(f"{f['what']}: {f['error']}")
    if "what" in f:  # an assertion without a text
        return Answer(f"{f['what']}, without a reason", verdict="unknown")
    # From 0.4.3 on the line with these words is the last line of a traceback.
    raised = log.last.get("raised")
    if raised is None or raised.process != line.process:
        return Answer("LMCache failed to start; the beginning of the line is not in the log")
    error = f"{raised.fields['type']}: {raised.fields['text']}".removesuffix(": ")
    return Answer(f"LMCache failed to start: {error}", evidence=(raised.evidence,))


class _Waits(dict[str, int]):
    """{request: number of steps in which it waited for its load}"""


@finding("KVD208", "waits-for-load", Severity.HANG, on=["kv_waiting"], symptom=True)
def waits_for_load(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request waits for its load for very many steps, and gets no answer.

    Cause: the load does not end, because the prefill instance, store or server does not answer. Or the load ended, but
    the connector did not report it. With prefill and decode the proxy may be the cause: a sidecar with another protocol
    than the connector sends kv_transfer_params that the prefill instance does not answer.

    First: `kvfix dump PID` shows what the workers wait for. Read the log of the prefill instance, store or server, and
    the workers' lines about this request. For a proxy or sidecar, check the connector's name (llm-d:
    `--connector=nixlv2` for NixlConnector), and that its release is as old as vLLM's.

    Normal: a few hundred steps while a load is in flight.
    """
    waits = log.state(_Waits)
    if len(waits) < 10_000 or line.request in waits:
        count = waits[line.request] = waits.get(line.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


@finding("KVD209", "start-waits-for-worker", Severity.HANG, on=[""], symptom=True)
def start_waits_for_worker(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The engine does not start or stands still: EngineCore waits for a worker that does not answer.

    Cause: the worker is busy or stuck. It may compile the model or load weights, which takes minutes, once. It may wait
    in a collective that another rank does not join: a dead rank, another node, P2P between GPUs. Or it waits in a
    connector hook: LMCacheMPConnector waits for a server that is not running, or that does not support the worker's
    transfer mode (KVD206).

    Setting: `kvfix dump PID` (or `py-spy dump --pid` of each worker) names the function. If the function is a connector
    hook, check that its server or store runs, and read its log (LMCacheMPConnector: `lmcache server`). If it is
    all_reduce or broadcast, find the rank whose stack differs, and try NCCL_P2P_DISABLE=1.

    Normal: some minutes while a large model is compiled, if the engine serves afterwards.
    """
    if log.counts["broadcast"] < 2 or log.failures.worked_since_wait:
        return None
    sentence = f"{log.counts['broadcast']} times a worker did not read EngineCore's message in time"
    return Answer(sentence, evidence=(log.first["broadcast"].evidence,))


@finding("KVD211", "lookups-given-up", Severity.SLOW, on=["lookup_given_up"])
def lookups_given_up(log: Diagnosis, line: LogLine) -> Answer | None:
    """Asynchronous lookups time out. EngineCore dies when vLLM asks again about a request with a timed out lookup.

    Setting: `lookup_timeout_ms` longer, or `enable_async_loading: false`.
    """
    return Answer(f"its lookup had no answer after {line.fields['seconds']} seconds, so vLLM computes it")


@finding("KVD213", "stands-in-connector", Severity.HANG, on=["stack"])
def stands_in_connector(log: Diagnosis, line: LogLine) -> Answer | None:
    """The engine may hang: a stack (py-spy) shows a thread inside a connector hook.

    Cause: one stack does not show how long the thread has been there. Take three stacks, some seconds apart. If they
    are equal, the thread waits for a server, a worker or a lock.

    Setting: `kvfix dump PID` saves the stacks of all processes with the state of the connector.
    """
    fields = line.fields
    in_hook = hook(fields["frames"])
    if not in_hook:
        return None
    file, number, function = fields["frames"][-1]
    where = f"{'/'.join(file.split('/')[-2:])}:{number}"
    process = line.process or "a process"
    return Answer(f"{process} is in {in_hook}, {fields['state']} in {function} ({where})", verdict="unknown")


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

    Setting: `kvfix dump PID` saves the Python stacks of the process. Then read the peer's log of this time, which shows
    the cause.
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
