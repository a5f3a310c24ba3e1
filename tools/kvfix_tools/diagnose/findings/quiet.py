"""Logs without an error that are not well: a start without an end, answers 500, a decode that fetches nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of
from kvfix_tools.diagnose.findings.offloading import External
from kvfix_tools.diagnose.findings.standstill import BY_REQUEST

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, LogLine

#: Intervals of vLLM's statistics with prompts, from which on no fetch at all says something.
INTERVALS = 3


@finding("KVD159", "ended-at-its-buffer", Severity.CRASH, on=[""])
def ended_at_its_buffer(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A process has not a word after it had begun to make LMCache's engine.

    Cause: what comes next is the CPU buffer, `max_local_cpu_size` GB (5 if it is not set) for each rank, touched and
    pinned page by page. A process that has no error there was killed for memory (of the container, or of the machine),
    or pins its pages for minutes, and vLLM gave it up. `dmesg -T | grep -i 'killed process'` and `kubectl describe pod`
    (OOMKilled, code 137) tell which.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE) so that it times the ranks of this machine is at most
    70 % of the container's memory; `ulimit -l unlimited`; if nothing was killed: VLLM_ENGINE_READY_TIMEOUT_S=1800.

    Good: the same, in every unit file and container.
    """
    if log.failures.first is not None or log.findings:
        return None
    last = [(process, at) for process, at in log.failures.last.items() if at.name in ("creating", "engine_configured")]
    goes_on = any(log.counts[name] for name in ("asked", "stored", "stats", "version"))
    if not last or (not log.failures.dead and (goes_on or len(last) < len(log.failures.last))):
        return None
    ranks = f"{len(last)} processes have" if len(last) > 1 else f"{last[0][0] or 'a process'} has"
    size = re.match(r"\d+(?:\.\d+)?", lookups_of(log).settings.get("max_local_cpu_size", ""))
    if size is not None and not float(size[0]):
        return None  # there is no such buffer
    room = f"; {len(last)} times {size[0]} GB are {len(last) * float(size[0]):g} GB" if size is not None else ""
    return Answer(
        f"{ranks} no line after `Creating LMCacheEngine`{room}",
        request="",
        verdict="unknown",
        evidence=tuple(at.evidence for _, at in last[:4]),
        note=not log.failures.dead,
    )


@finding("KVD1055", "decode-fetches-nothing", Severity.SLOW, on=[""])
def decode_fetches_nothing(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A decode engine computes its prompts itself: not one token came from prefill.

    Cause: it fetches for requests only whose `kv_transfer_params` name the prefill engine (`do_remote_prefill: true`,
    `remote_engine_id`, `remote_block_ids`, `remote_host`, `remote_port`). The client or the gateway sends straight to
    decode, or the router does not hand on what prefill answered: prefill has to be asked with `max_tokens: 1` and
    `"kv_transfer_params": {"do_remote_decode": true}`, and its answer's kv_transfer_params go into the request to
    decode. No line of prefill at the same time proves the first.

    Setting: `curl http://PREFILL/v1/completions` with `"max_tokens": 1` and the kv_transfer_params above, then its
    kv_transfer_params to decode: if `External prefix cache hit rate` rises above 0, the router is the cause.
    `examples/disaggregated/disaggregated_serving/` of vLLM has a router that hands them on; llm-d: the routing
    sidecar, and a path that it knows (/v1/completions, /v1/chat/completions).

    Good: a router for this connector; no setting of the engines replaces it.

    Normal: prompts shorter than a block, and requests that are sent to decode on purpose.
    """
    kept = log.state(External)
    if kept.intervals < INTERVALS or kept.external or log.findings or log.failures.dead:
        return None
    if log.who.roles != {"kv_consumer"} or not log.who.connectors or log.who.connectors - BY_REQUEST:
        return None
    return Answer(
        f"{kept.intervals} intervals with prompts, 0.0% external", request="", verdict="unknown",
        evidence=(kept.last,),
    )  # fmt: skip


@finding("KVD1057", "answers-500-without-error", Severity.RISK, on=["answered_500", ""])
def answers_500_without_error(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests are answered with 500, and this log has no error.

    Cause: with a KV connector mostly a load that failed: `kv_load_failure_policy` is `fail` unless it is set, vLLM ends
    the request, and the API server answers 500 without a line of its own. EngineCore's line `Failing ... request(s) due
    to KV load failure` of that second, and the worker's before it, tell why; they are not in this log.

    Setting: `"kv_load_failure_policy": "recompute"` in --kv-transfer-config of the engine that loads (vLLM 0.15 or
    newer) answers such requests. For the cause: the whole log, of all processes (`kubectl logs POD -c CONTAINER`,
    `docker logs`), or `--log-error-stack` at the next start, which logs what the API server raised.

    Good: what those lines name.
    """
    if line is not None:
        log.state(_Seen).answered_500 = log.state(_Seen).answered_500 or line.evidence
        return None
    first = log.state(_Seen).answered_500
    if first is None or log.findings or log.failures.dead or log.failures.first is not None or not log.who.connectors:
        return None
    return Answer(f"{log.counts['answered_500']} answers 500", request="", verdict="unknown", evidence=(first,))


class _Seen:
    """The first answer 500, and the last start of an engine."""

    def __init__(self) -> None:
        self.answered_500: Evidence | None = None
        self.start: Evidence | None = None


@note("vllm_version")
def _note_start(log: Diagnosis, line: LogLine) -> None:
    log.state(_Seen).start = line.evidence


@finding("KVD1059", "start-without-an-end", Severity.NOTE, on=[""])
def start_without_an_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The log ends while the engine starts, and says nothing of a failure.

    Cause: it is cut here, it still starts (weights, compilation), or a process hangs or was killed. What decides: `ps`
    or `kubectl describe pod` (a container that restarts, OOMKilled, code 137), `nvidia-smi`, and `py-spy dump --pid
    PID` of each EngineCore and worker. A connector hangs there where it opens its transport (NIXL, Mooncake), waits for
    a server (LMCacheMPConnector: 300 s), or fills and pins its CPU buffer (minutes for hundreds of GB).

    Setting: `py-spy dump --pid PID` of EngineCore and each worker: give the stacks to kvfix-diagnose; or the next
    minutes of the log. Without --kv-transfer-config the engine either starts, and the connector is the cause, or it
    does not.

    Good: what the stacks show.

    Normal: a log that was copied before the engine was up.
    """
    if log.findings or log.failures.dead or log.failures.first is not None:
        return None
    counts = log.counts
    works = any(
        counts[name]
        for name in ("up", "engine_up", "stats", "asked", "stored", "moved", "answered_500", "closing", "recorded")
    )
    start = log.state(_Seen).start
    if start is None or not log.who.connectors or works:
        return None
    return Answer(
        "no process says that it is up after `Initializing a V1 LLM engine`",
        request="", verdict="unknown", evidence=(start,), note=True,
    )  # fmt: skip
