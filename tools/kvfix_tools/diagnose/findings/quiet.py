"""Findings about logs without an error: a start that does not end, status 500, a decode instance that loads no KV."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of
from kvfix_tools.diagnose.findings.statistics import BY_REQUEST, External

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: A finding needs this many intervals of vLLM's statistics with prompts but without a load.
INTERVALS = 3


@finding("KVD159", "ended-at-its-buffer", Severity.CRASH, on=[""])
def ended_at_its_buffer(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The engine dies or hangs at its start, while LMCache allocates its CPU cache: a process logs nothing after that.

    Cause: LMCache allocates and pins `max_local_cpu_size` GB (default 5) for each rank, page by page. A process without
    an error was killed because the container or machine had no memory left, or it pins pages longer than vLLM waits.
    `dmesg -T |
    grep -i 'killed process'` and `kubectl describe pod` (OOMKilled, code 137) show which.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE) lower, so that its product with the ranks of this machine
    is at most 70 % of the container's memory; and `ulimit -l unlimited`. If no process was killed, set
    VLLM_ENGINE_READY_TIMEOUT_S=1800.

    Good: these settings in every unit file and container.
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
        return None  # LMCache has no CPU buffer
    room = f"; {len(last)} times {size[0]} GB are {len(last) * float(size[0]):g} GB" if size is not None else ""
    evidence = tuple(at.evidence for _, at in last[:4])
    sentence = f"{ranks} no line after `Creating LMCacheEngine`{room}"
    return Answer(sentence, verdict="unknown", evidence=evidence, note=not log.failures.dead)


@finding("KVD1055", "decode-fetches-nothing", Severity.SLOW, on=[""])
def decode_fetches_nothing(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A decode instance computes its prompts itself: no token comes from a prefill instance.

    Cause: the decode instance loads KV only for requests whose `kv_transfer_params` name the prefill instance
    (`do_remote_prefill: true`, `remote_engine_id`, `remote_block_ids`, `remote_host`, `remote_port`). The router must
    first send the request to prefill with `max_tokens: 1` and `"kv_transfer_params": {"do_remote_decode": true}`. Then
    it must copy the answer's kv_transfer_params into the request that it sends to decode. Here the router does not copy
    them, or requests go directly to decode. If prefill logs nothing at this time, requests go directly to decode.

    Setting: `curl http://PREFILL/v1/completions` with `"max_tokens": 1` and the kv_transfer_params above. Then send a
    request with the answer's kv_transfer_params to decode. If `External prefix cache hit rate` rises above 0, the
    router is the cause. vLLM's `examples/disaggregated/disaggregated_serving/` has a router that copies them. With
    llm-d, use the routing sidecar and a path that it knows (/v1/completions, /v1/chat/completions).

    Good: a router for this connector. No setting of the engines replaces the router.

    Normal: prompts shorter than a block, and requests that are sent to decode on purpose.
    """
    kept = log.state(External)
    if kept.intervals < INTERVALS or kept.external or log.findings or log.failures.dead:
        return None
    if log.who.roles != {"kv_consumer"} or not log.who.connectors or log.who.connectors - BY_REQUEST:
        return None
    sentence = f"{kept.intervals} intervals with prompts, 0.0% external"
    return Answer(sentence, verdict="unknown", evidence=(kept.last,))


@finding("KVD1057", "answers-500-without-error", Severity.RISK, on=[""])
def answers_500_without_error(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests are answered with 500, but this log has no error.

    Cause: with a KV connector, a failed load is the usual cause. The default of `kv_load_failure_policy` is `fail`:
    vLLM ends the request, and the API server answers 500 without a log line. EngineCore's line `Failing ... request(s)
    due to KV load failure` and earlier lines of the worker show the cause. These lines are not in this log.

    Setting: `"kv_load_failure_policy": "recompute"` in --kv-transfer-config of the engine that loads (vLLM 0.15 or
    newer) answers these requests. To find the cause, get the whole log of all processes (`kubectl logs POD -c
    CONTAINER`, `docker logs`), or start with `--log-error-stack`, which logs the exceptions of the API server.

    Good: a fix of the failure that EngineCore's and the worker's lines name.
    """
    first = log.first.get("answered_500")
    if first is None or log.findings or log.failures.dead or log.failures.first is not None or not log.who.connectors:
        return None
    sentence = f"{log.counts['answered_500']} requests were answered with 500"
    return Answer(sentence, verdict="unknown", evidence=(first.evidence,))


@finding("KVD1059", "start-without-an-end", Severity.NOTE, on=[""])
def start_without_an_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The log ends while the engine starts, without an error.

    Cause: the log is cut, the engine still starts (weights, compilation), or a process hangs or was killed. `kubectl
    describe pod` (restarts, OOMKilled, code 137), `nvidia-smi` and `py-spy dump --pid PID` of EngineCore and each
    worker show which. A connector may hang while it opens its transport (NIXL, Mooncake), waits for a server
    (LMCacheMPConnector: 300 s), or allocates and pins its CPU buffer (minutes for hundreds of GB).

    Setting: `py-spy dump --pid PID` of EngineCore and each worker, then run kvfix-diagnose with the stacks, or with the
    next minutes of the log. If the engine starts without --kv-transfer-config, the connector is the cause.

    Good: a fix of the cause that the stacks show.

    Normal: a log that was copied before the start was complete.
    """
    if log.findings or log.failures.dead or log.failures.first is not None:
        return None
    counts = log.counts
    works = any(
        counts[name]
        for name in ("up", "engine_up", "stats", "asked", "stored", "moved", "answered_500", "closing", "recorded")
    )
    start = log.last.get("vllm_version")
    if start is None or not log.who.connectors or works:
        return None
    sentence = "no process reports the end of its start after `Initializing a V1 LLM engine`"
    return Answer(sentence, verdict="unknown", evidence=(start.evidence,), note=True)
