"""Nothing crashes, and nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine

#: The same answer for the same request so many times, and no admission.
POLLS = 1000


class _Head:
    """The request that is asked about now: its fields, and the lookups and the work done when it came.

    generation: tokens a second in vLLM's last statistics; None: there are none.
    """

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.asked = self.done = 0
        self.generation: float | None = None


@finding("KVD201", "asked-for-ever", Severity.HANG, on=["asked"])
def asked_for_ever(log: Diagnosis, line: LogLine) -> Answer | None:
    """One request is asked about on every step, and never admitted.

    Cause: the head of the queue gets no blocks: its load needs more than is ever free, or what it is promised can never
    be granted. Everything behind it waits too.

    Setting: `--num-gpu-blocks-override` or `--gpu-memory-utilization` higher, for more KV blocks; or a smaller
    `--max-model-len` or `--max-num-seqs`; or `max_tokens_per_load` unset.
    """
    f = line.fields
    done = log.counts["stored"] + log.counts["retrieved"]
    asked = log.counts["asked"]
    head = log.state(_Head)
    if not head.fields or head.done != done or (head.fields is not f and _answer(head.fields) != _answer(f)):
        # Another request, or work was done: a queue behind a busy engine is asked about on every step too.
        head.fields, head.asked, head.done = f, asked, done
        return None
    moving = head.generation
    if moving or asked - head.asked < (POLLS if moving is not None else 5 * POLLS):
        return None
    head.asked = asked
    return Answer(
        f"asked {POLLS} times in a row with the same answer and more: hit {f.get('hit')}, need to load {f.get('need')}"
        + ("" if moving is not None else "; without vLLM's statistics it may be the queue of a busy engine"),
        verdict="unknown" if moving is None else "violated",
    )


def _answer(fields: Fields) -> tuple[Any, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@note("stats")
def _note_generation(log: Diagnosis, line: LogLine) -> None:
    log.state(_Head).generation = float(line.fields["generation"])


@finding("KVD203", "lookups-not-answered", Severity.HANG, on=["lookup_timeout"], symptom=True)
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

    First: `grep -n 'LMCache ERROR' LOG | head` shows what LMCache says at its start: put it right, and restart.
    """
    f = line.fields
    if "what" in f and f["error"]:
        return Answer(f"{f['what']}: {f['error']}", request="")
    if "what" in f:  # an assertion without a text
        return Answer(f"{f['what']}, and no reason is given", request="", verdict="unknown")
    raised = log.state(_LastRaised).line
    if raised is None or raised.process != line.process:
        return Answer("it failed to start; the beginning of the line is not in the log", request="")
    error = f"{raised.fields['type']}: {raised.fields['text']}".removesuffix(": ")
    return Answer(f"LMCache failed to start: {error}", request="", evidence=(raised.evidence,))


class _LastRaised:
    """The last exception. If the error of KVD207 is a whole traceback, its line begins before the traceback."""

    def __init__(self) -> None:
        self.line: LogLine | None = None


@note("raised")
def _note_raised(log: Diagnosis, line: LogLine) -> None:
    log.state(_LastRaised).line = line


class _Waits(dict[str, int]):
    """{request: steps in which it waited for its load}"""


@finding("KVD208", "waits-for-load", Severity.HANG, on=["kv_waiting"], symptom=True)
def waits_for_load(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request waits for a load for very many steps.

    Cause: the load does not end, or its end is not reported: the other side (prefill, store, server) does not answer,
    or the connector has lost it. With prefill and decode the proxy may be it: a sidecar that speaks another protocol
    than the connector of this vLLM puts nothing into kv_transfer_params that prefill would send for.

    First: `kvfix dump PID` shows what the workers wait for; look at the log of the other side, and at the workers'
    lines about this request. A proxy or sidecar: its connector's name (llm-d: `--connector=nixlv2` for
    NixlConnector), and that it is of the same weeks as vLLM.

    Normal: some hundred steps, while a load is in flight.
    """
    waits = log.state(_Waits)
    if len(waits) < 10_000 or line.request in waits:
        count = waits[line.request] = waits.get(line.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


class _FirstWait:
    def __init__(self) -> None:
        self.evidence: Evidence | None = None


@note("broadcast")
def _note_wait(log: Diagnosis, line: LogLine) -> None:
    log.state(_FirstWait).evidence = log.state(_FirstWait).evidence or line.evidence


@finding("KVD209", "start-waits-for-worker", Severity.HANG, on=[""], symptom=True)
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
    first = log.state(_FirstWait).evidence
    sentence = f"{log.counts['broadcast']} times no worker took what EngineCore gave it in time"
    return Answer(sentence, request="", evidence=() if first is None else (first,))


@finding("KVD211", "lookups-given-up", Severity.SLOW, on=["lookup_given_up"])
def lookups_given_up(log: Diagnosis, line: LogLine) -> Answer | None:
    """Asynchronous lookups take too long and are given up. The next question about such a request kills EngineCore.

    Setting: a longer `lookup_timeout_ms`, or `enable_async_loading: false`.
    """
    return Answer(f"not answered after {line.fields['seconds']} seconds, computed instead")


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
