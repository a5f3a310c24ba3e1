"""Nothing crashes, and nothing moves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix import redact
from kvfix_tools.diagnose.failures import hook
from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine

#: The same answer for the same request so many times, and no admission.
POLLS = 1000
#: Intervals of vLLM's statistics (10 seconds each) without a token, with requests waiting.
IDLE = 3


@finding("KVD201", "asked-for-ever", Severity.HANG, on=["asked"])
def asked_for_ever(log: Diagnosis, line: LogLine) -> Answer | None:
    """One request is asked about on every step, and never admitted.

    Cause: the head of the queue gets no blocks: its load needs more than is ever free, or what it is promised can never
    be granted. Everything behind it waits too.

    Setting: more KV blocks (`gpu_memory_utilization`), a smaller `max_model_len` or `max_num_seqs`, or
    `max_tokens_per_load` unset.
    """
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


def _answer(fields: Fields) -> tuple[object, ...]:
    return fields["request"], fields.get("hit"), fields.get("computed"), fields.get("need")


@note("stats")
def _note_generation(log: Diagnosis, line: LogLine) -> None:
    """What KVD201 has to know: whether the engine computes anything."""
    log.memory["generation"] = float(line.fields["generation"])


@finding("KVD202", "nothing-moves", Severity.HANG, on=["stats", ""])
def nothing_moves(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests wait, and the engine computes nothing.

    Cause: what a request at the head of the queue waits for does not come: a load that was never started or does not
    end, a lookup that is not answered, or blocks that are kept back. Look at the other findings; none: take
    `kvfix dump PID`.

    Setting: vLLM before 0.32 can lock asynchronous loads out of one another when blocks are short: fewer requests at
    once (`max_num_seqs`).

    Normal: an idle engine, with nothing waiting.
    """
    still = log.memory.setdefault("still", {})
    if line is None:
        return _still_at_the_end(still)
    f = line.fields
    engine = (str(f.get("engine", "")), line.process)
    if f["waiting"] == 0 or float(f["prompt"]) or float(f["generation"]):
        still.pop(engine, None)
        return None
    count = still[engine][0] + 1 if engine in still else 1
    what = f"Running {f['running']}, Waiting {f['waiting']}, no token"
    if engine in still or len(still) < 1000:
        still[engine] = (count, what, line.evidence)
    return Answer(f"{what} for {count} intervals", request="") if count >= IDLE else None


def _still_at_the_end(still: dict[tuple[str, str], tuple[int, str, Evidence]]) -> Answer | None:
    """An engine that computes nothing says so once; from then on vLLM has its statistics at DEBUG (loggers.py
    0.12.0:194 to 0.32.0:272), and its silence is all that a log at INFO shows.
    """
    for count, what, evidence in still.values():
        if count < IDLE:
            sentence = f"{what}, and no statistics after it: vLLM leaves them out at INFO while nothing is computed"
            return Answer(sentence, request="", verdict="unknown", evidence=(evidence,))
    return None


@finding("KVD203", "lookups-not-answered", Severity.HANG, on=["lookup_timeout"])
def lookups_not_answered(log: Diagnosis, line: LogLine) -> Answer | None:
    """The workers do not answer lookups, and every step of the scheduler waits for one.

    Setting: a shorter `lookup_timeout_ms`; and look why the worker's LMCache does not answer (KVD207).
    """
    if log.counts["lookup_timeout"] < 3:
        return None
    rank = line.fields["rank"]
    return Answer(f"rank {rank} did not answer a lookup in time", request="")


@finding("KVD204", "server-does-not-answer", Severity.HANG, on=["mp_timeout", "mp_unhealthy"])
def server_does_not_answer(log: Diagnosis, line: LogLine) -> Answer | None:
    """The LMCache server does not answer: vLLM goes on without the cache.

    Cause: no server at `lmcache.mp.host` and `lmcache.mp.port`, or it is overloaded, or has gone.

    Setting: start the server before vLLM, and give both the same port; look into the server's log.
    """
    what = line.fields.get("what", "a ping")
    server = line.fields.get("server")
    return Answer(f"{what} timed out{' at ' + server if server else ''}; the server is marked unhealthy", request="")


@finding("KVD205", "server-never-asked-again", Severity.HANG, on=[""])
def server_never_asked_again(log: Diagnosis, line: LogLine) -> Answer | None:
    """After one lookup that timed out the cache is off until vLLM is started again."""
    timed_out = log.counts["mp_timeout"]
    if not timed_out or log.counts["mp_healthy"] or log.releases.within("lmcache", ">=0.5.0,<0.5.6") is not True:
        return None
    return Answer(f"{timed_out} lookups timed out, and `LMCache server is healthy again` never comes", request="")


@finding("KVD206", "transfer-mode-mismatch", Severity.HANG, on=["no_handler"])
def transfer_mode_mismatch(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server does not know the operation a worker asks for, and does not answer: the worker waits for 300 seconds.

    Cause: the server was started for one transfer mode, the worker chose another. The answer that would tell it is
    never sent.

    Setting: start the server with `--supported-transfer-mode auto`, or the worker with the mode of the server
    (`lmcache.mp.mp_transfer_mode`, `LMCACHE_MP_TRANSFER_MODE`); and the same LMCache release on both sides.
    """
    mode = log.memory.get("mode")
    return Answer(
        f"the server has no handler for {line.fields['operation']}{'; its transfer mode is ' + mode if mode else ''}",
        request="",
    )


@note("transfer_mode")
def _note_mode(log: Diagnosis, line: LogLine) -> None:
    """What KVD206 has to know."""
    log.memory["mode"] = line.fields["mode"]


@finding("KVD207", "worker-without-lmcache", Severity.HANG, on=["degraded"])
def worker_without_lmcache(log: Diagnosis, line: LogLine) -> Answer | None:
    """LMCache failed to start in a process, which goes on without it; the scheduler is not told, and waits for it.

    Cause: what the line says. Every lookup then runs into its timeout.

    Setting: put right what LMCache says; it is at the beginning of the log.
    """
    f = line.fields
    if "what" in f:
        return Answer(f"{f['what']}: {f['error'] or 'no reason given'}", request="")
    process, error, raised = log.memory.get("raised", ("", "", None))
    if process != line.process or not error:
        return Answer("it failed to start; the beginning of the line is not in the log", request="")
    return Answer(f"LMCache failed to start: {error}", request="", evidence=(raised.evidence,))


@note("raised")
def _note_raised(log: Diagnosis, line: LogLine) -> None:
    """What KVD207 has to know: where the error is a whole traceback, the line that tells of it begins before it."""
    f = line.fields
    log.memory["raised"] = (line.process, f"{f['type']}: {f['text']}" if f["text"] else f["type"], line)


@finding("KVD208", "waits-for-load", Severity.HANG, on=["kv_waiting"])
def waits_for_load(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request waits for a load for very many steps.

    Normal: some hundred steps, while a load is in flight.
    """
    waits = log.memory.setdefault("waits", {})
    if len(waits) < 10_000 or line.request in waits:
        count = waits[line.request] = waits.get(line.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


@finding("KVD209", "start-waits-for-worker", Severity.HANG, on=[""])
def start_waits_for_worker(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """EngineCore waits for a worker that does not answer.

    Cause: the worker is busy or stuck: with the multi-process connector it waits for a server that is not there, or
    that does not know the worker's transfer mode (the server's log tells, KVD206).

    Setting: look whether the LMCache server runs, and at its log.

    Normal: for minutes, while a large model is compiled, and then the engine serves.
    """
    if log.counts["broadcast"] < 2 or log.failures.worked_since_wait:
        return None
    return Answer(f"{log.counts['broadcast']} times no worker took what EngineCore gave it in time", request="")


@finding("KVD210", "worker-forgotten", Severity.HANG, on=["reaped", "unregistered"])
def worker_forgotten(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server has forgotten a worker, and refuses what it asks for.

    Setting: a longer `worker_registration_grace_seconds` of the server.
    """
    f = line.fields
    if line.name == "reaped":
        return Answer(f"worker {f['instance']} was silent for {f['silent']} s (pinged={f['pinged']})", request="")
    return Answer(f"worker {f['instance']} is not registered", request="")


@finding("KVD211", "lookups-given-up", Severity.SLOW, on=["lookup_given_up"])
def lookups_given_up(log: Diagnosis, line: LogLine) -> Answer | None:
    """Asynchronous lookups take too long and are given up. The next question about such a request kills EngineCore.

    Setting: a longer `lookup_timeout_ms`, or `enable_async_loading: false`.
    """
    return Answer(f"not answered after {line.fields['seconds']} seconds, computed instead")


#: How the server begins to tell of a handler that failed; the traceback stands below it, within so many lines.
_HANDLER = re.compile(
    r"Error (?:in blocking handler|handling (?:request RequestType\.|operation )(?P<operation>\w+))(?:: (?P<error>.+))?"
)
_BELOW = 120
#: Operations whose answer no client waits for: they fail when a worker has gone.
_UNASKED = frozenset({"end_session"})


@finding("KVD212", "server-handler-fails", Severity.HANG, on=["logged", "raised", ""])
def server_handler_fails(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The server failed at a request and sent no answer: the client waits until its own timeout.

    Cause: a handler of the server raised; what is wrong is the last line of its traceback. No release tells the client
    (0.5.6), which can only say that it timed out.

    Setting: put right what the traceback's last line says, then restart the server and after it vLLM;
    `lmcache.mp.mq_timeout` in kv_connector_extra_config makes the client give up earlier.
    """
    head: LogLine | None = log.memory.get("handler")
    if line is None:
        return Answer(head.evidence.text[:160], request="", evidence=(head.evidence,)) if head is not None else None
    if line.name == "logged":
        found = _HANDLER.search(line.evidence.text) if line.body.find(b"andl") >= 0 else None
        if found is None:
            return None
        log.memory["handler"] = None if found["error"] else line
        return _failed_handler(log, line, line, found["error"]) if found["error"] else None
    if head is None or line.process or head.file != line.file or not 0 < line.number - head.number < _BELOW:
        return None
    log.memory["handler"] = None
    if any(frame[2] in _UNASKED for frame in line.fields["frames"]):
        return None
    fields = line.fields
    return _failed_handler(log, head, line, f"{fields['type']}: {fields['text']}".rstrip(": "))


def _failed_handler(log: Diagnosis, head: LogLine, line: LogLine, error: str) -> Answer:
    """Noted for the findings of its client. What fails at a registration counts most."""
    found = _HANDLER.search(head.evidence.text)
    operation = (found["operation"] if found is not None else None) or "a request"
    registers = "register" in operation.lower()
    known = log.memory.get("server_error")
    if known is None or (registers and not known[0]):
        log.memory["server_error"] = (registers, redact.text(error[:160]), head.evidence, line.evidence)
    return Answer(f"{operation.lower()}: {error[:200]}", request="", evidence=(head.evidence,))


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
