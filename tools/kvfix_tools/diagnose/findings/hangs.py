"""Nothing crashes, and nothing moves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, Severity, finding, note
from kvfix_tools.diagnose.findings.memory import PASTE

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Fields, LogLine

#: The same answer for the same request so many times, and no admission.
POLLS = 1000
#: NIXL storage is switched on; its pool has no fixed size.
_NIXL = re.compile(rb"(?i)enable_nixl_storage\W{1,6}true")
_DYNAMIC = re.compile(rb"nixl_pool_size\W{1,6}0\b")


@finding("KVD201", "asked-for-ever", Severity.HANG, on=["asked", ""])
def asked_for_ever(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """One request is asked about on every step, and never admitted.

    Cause: the head of the queue gets no blocks: its load needs more than is ever free, or what it is promised can never
    be granted. Everything behind it waits too.

    Setting: more KV blocks (`gpu_memory_utilization`), a smaller `max_model_len` or `max_num_seqs`, or
    `max_tokens_per_load` unset.
    """
    if line is None:
        return _asked_in_a_paste(log)
    f = line.fields
    done = log.counts["stored"] + log.counts["retrieved"]
    asked = log.counts["asked"]
    head = log.memory.get("head")
    if head is None or head[2] != done or (head[0] is not f and _answer(head[0]) != _answer(f)):
        # Another request, or work was done: a queue behind a busy engine is asked about on every step too.
        log.memory["head"] = [f, asked, done]
        return None
    moving = log.memory.get("generation")
    if moving or asked - head[1] < (POLLS if moving is not None else 5 * POLLS):
        return None
    head[1] = asked
    return Answer(
        f"asked {POLLS} times in a row with the same answer and more: hit {f.get('hit')}, need to load {f.get('need')}"
        + ("" if moving is not None else "; without vLLM's statistics it may be the queue of a busy engine"),
        verdict="unknown" if moving is None else "violated",
    )


def _asked_in_a_paste(log: Diagnosis) -> Answer | None:
    """A few lines of a flood: one request that has nothing to load, asked about again, and nothing else."""
    asked = log.counts["asked"]
    if not 2 <= asked <= PASTE or asked != log.counts.total() or "head" not in log.memory:
        return None
    fields, since, _ = log.memory["head"]
    request, hit, _, need = _answer(fields)
    if since != 1 or not hit or need is None or need > 0:
        return None
    return Answer(
        f"asked {asked} times, hit {hit}, need to load {need}: nothing is to be loaded, and it is not admitted. It is "
        "this if the log goes on so; else the queue of a busy engine",
        request=request,
        verdict="unknown",
    )


def _answer(fields: Fields) -> tuple[Any, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@note("stats")
def _note_generation(log: Diagnosis, line: LogLine) -> None:
    """What KVD201 has to know: whether the engine computes anything."""
    log.memory["generation"] = float(line.fields["generation"])


@finding("KVD203", "lookups-not-answered", Severity.HANG, on=["lookup_timeout"])
def lookups_not_answered(log: Diagnosis, line: LogLine) -> Answer | None:
    """The workers do not answer lookups, and every step of the scheduler waits for one.

    Setting: a shorter `lookup_timeout_ms`; and look why the worker's LMCache does not answer (KVD207).
    """
    if log.counts["lookup_timeout"] < 3:
        return None
    rank = line.fields["rank"]
    elsewhere = (
        "" if str(rank) == "0" else "; on another node it never will: lookup_server_worker_ids: [0] asks rank 0 alone"
    )
    return Answer(f"rank {rank} did not answer a lookup in time{elsewhere if str(rank) != '0' else ''}", request="")


@finding("KVD207", "worker-without-lmcache", Severity.HANG, on=["degraded"])
def worker_without_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCache failed to start in a process, which goes on without it; the scheduler is not told, and waits for it.

    Cause: what the line says. Every lookup then runs into its timeout.

    First: put right what LMCache says (it is at the beginning of the log), and restart.
    """
    f = line.fields
    if "what" in f and f["error"]:
        return Answer(f"{f['what']}: {f['error']}", request="")
    if "what" in f:  # an assertion without a text
        silent = problems.find("KVD833")
        return Answer(f"{f['what']}, and no reason is given", request="", verdict="unknown", record=silent)
    process, error, raised = log.memory.get("raised", ("", "", None))
    if process != line.process or not error:
        return Answer("it failed to start; the beginning of the line is not in the log", request="")
    return Answer(f"LMCache failed to start: {error}", request="", evidence=(raised.evidence,))


@note("raised")
def _note_raised(log: Diagnosis, line: LogLine) -> None:
    """What KVD207 has to know: where the error is a whole traceback, the line that tells of it begins before it."""
    f = line.fields
    log.memory["raised"] = (line.process, f"{f['type']}: {f['text']}" if f["text"] else f["type"], line)


@finding("KVD208", "waits-for-load", Severity.HANG, on=["kv_waiting", ""])
def waits_for_load(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A request waits for a load for very many steps.

    Cause: the load does not end, or its end is not reported: the other side (prefill, store, server) does not answer,
    or the connector has lost it. With prefill and decode the proxy may be it: a sidecar that speaks another protocol
    than the connector of this vLLM puts nothing into kv_transfer_params that prefill would send for.

    First: look at the log of the other side, and at the workers' lines about this request; of a proxy or sidecar at its
    connector's name (llm-d: `--connector=nixlv2` for NixlConnector) and that it is of the same weeks as vLLM.

    Normal: some hundred steps, while a load is in flight.
    """
    waits = log.memory.setdefault("waits", {})
    if line is None:
        return _waits_in_a_paste(log, waits)
    if len(waits) < 10_000 or line.request in waits:
        count = waits[line.request] = waits.get(line.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


def _waits_in_a_paste(log: Diagnosis, waits: dict[str, int]) -> Answer | None:
    """A few lines of a flood: one request that waits in each step, and nothing else."""
    if len(waits) != 1 or not 2 <= log.counts["kv_waiting"] <= PASTE or log.counts.total() != log.counts["kv_waiting"]:
        return None
    ((request, steps),) = waits.items()
    sentence = f"waits for its load in each of {steps} steps. It is this if the log goes on so; else a load in flight"
    return Answer(sentence, request=request, verdict="unknown")


@finding("KVD209", "start-waits-for-worker", Severity.HANG, on=[""])
def start_waits_for_worker(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """EngineCore waits for a worker that does not answer.

    Cause: the worker is busy or stuck. It compiles or loads (minutes, once); it waits in a collective that another rank
    does not join (a rank that died, another node, P2P between the GPUs); or it stands in a hook of the connector: with
    the multi-process one for a server that is not there, or that does not know the worker's transfer mode (KVD206).

    Setting: `kvfix dump PID` (or `py-spy dump --pid` of each worker) names the function. A hook: look whether the
    server or store that it waits for runs, and at its log (LMCacheMPConnector: `lmcache server`). all_reduce,
    broadcast: the rank whose stack differs; once with NCCL_P2P_DISABLE=1.

    Normal: for minutes, while a large model is compiled, and then the engine serves.
    """
    if log.counts["broadcast"] < 2 or log.failures.worked_since_wait:
        return None
    return Answer(f"{log.counts['broadcast']} times no worker took what EngineCore gave it in time", request="")


@finding("KVD211", "lookups-given-up", Severity.SLOW, on=["lookup_given_up", ""])
def lookups_given_up(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Asynchronous lookups take too long and are given up. The next question about such a request kills EngineCore.

    Setting: a longer `lookup_timeout_ms`, or `enable_async_loading: false`.
    """
    if line is None:
        _never_answered(log)
        return None
    return Answer(f"not answered after {line.fields['seconds']} seconds, computed instead")


def _never_answered(log: Diagnosis) -> None:
    """NIXL storage next to KVD211: until 0.5.6 NixlStaticStorageBackend has no batched_async_contains."""
    is_static = any(_NIXL.search(text) and not _DYNAMIC.search(text) for text in log.pasted)
    if not is_static or log.releases.within("lmcache", ">=0.5.6") is True:
        return
    for found in log.findings:
        if found.rule.code == "KVD211":
            found.sentence += "; NIXL storage with a pool of fixed size answers no asynchronous lookup before LMCache "
            found.sentence += "0.5.6: enable_async_loading: false"


@finding("KVD213", "stands-in-connector", Severity.HANG, on=["stack"])
def stands_in_connector(log: Diagnosis, line: LogLine) -> Answer | None:
    """A stack of the engine (py-spy) shows a thread inside a connector hook.

    Cause: one stack shows where it is, not how long: take three, some seconds apart. If they are the same, it waits
    there: for a server or a worker that does not answer, or for a lock.

    Setting: `kvfix dump PID` takes the stacks of all processes with the state of the connector, and says who waits.
    """
    fields = line.fields
    in_hook = hook(fields["frames"])
    if not in_hook:
        return None
    file, number, function = fields["frames"][-1]
    where = f"{'/'.join(file.split('/')[-2:])}:{number}"
    process = line.process or "a process"
    return Answer(f"{process} is in {in_hook}, {fields['state']} in {function} ({where})", verdict="unknown")
