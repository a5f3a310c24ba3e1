"""Nothing crashes, and nothing moves."""

from __future__ import annotations

from typing import Any

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

#: The same answer for the same request so many times, and no admission.
POLLS = 1000
#: Intervals of vLLM's statistics (10 seconds each) without a token, with requests waiting.
IDLE = 3


@finding("KVD201", "asked-for-ever", Severity.HANG, on=["asked"])
def asked_for_ever(case: Any, seen: Any) -> Answer | None:
    """One request is asked about on every step, and never admitted.

    Cause: the head of the queue gets no blocks: its load needs more than is ever free, or what it is promised can never
    be granted. Everything behind it waits too.

    Setting: more KV blocks (`gpu_memory_utilization`), a smaller `max_model_len` or `max_num_seqs`, or
    `max_tokens_per_load` unset.
    """
    key = (seen.request, seen.fields.get("hit"), seen.fields.get("computed"), seen.fields.get("need"))
    done = case.counts["stored"] + case.counts["retrieved"]
    asked = case.counts["asked"]
    head = case.memory.setdefault("head", [key, asked, done])
    if head[0] != key or head[2] != done:
        # Another request, or work was done: a queue behind a busy engine is asked about on every step too.
        case.memory["head"] = [key, asked, done]
        return None
    moving = case.memory.get("generation")
    if moving or asked - head[1] < (POLLS if moving is not None else 5 * POLLS):
        return None
    head[1] = asked
    f = seen.fields
    return Answer(
        f"asked {POLLS} times in a row with the same answer and more: hit {f.get('hit')}, need to load {f.get('need')}"
        + ("" if moving is not None else "; without vLLM's statistics it may be the queue of a busy engine"),
        verdict="unknown" if moving is None else "violated",
    )


@note("stats")
def _note_generation(case: Any, seen: Any) -> None:
    """What KVD201 has to know: whether the engine computes anything."""
    case.memory["generation"] = float(seen.fields["generation"])


@finding("KVD202", "nothing-moves", Severity.HANG, on=["stats", ""], fixes=["KVF903"])
def nothing_moves(case: Any, seen: Any) -> Answer | None:
    """Requests wait, and the engine computes nothing.

    Cause: what a request at the head of the queue waits for does not come: a load that nobody started or that does not
    end, a lookup that is not answered, or blocks that are kept back. Look at the other findings; none: take
    `kvfix dump PID`.

    Setting: vLLM before 0.32 can lock asynchronous loads out of one another when blocks are short: fewer requests at
    once (`max_num_seqs`).

    Normal: an idle engine, with nothing waiting.
    """
    still = case.memory.setdefault("still", {})
    if seen is None:
        return _still_at_the_end(still)
    f = seen.fields
    engine = (str(f.get("engine", "")), seen.process)
    if f["waiting"] == 0 or float(f["prompt"]) or float(f["generation"]):
        still.pop(engine, None)
        return None
    count = still[engine][0] + 1 if engine in still else 1
    what = f"Running {f['running']}, Waiting {f['waiting']}, no token"
    if engine in still or len(still) < 1000:
        still[engine] = (count, what, seen.evidence)
    return Answer(f"{what} for {count} intervals", request="") if count >= IDLE else None


def _still_at_the_end(still: dict[tuple[str, str], tuple[int, str, Any]]) -> Answer | None:
    """An engine that computes nothing says so once; from then on vLLM has its statistics at DEBUG (loggers.py
    0.12.0:194 to 0.32.0:272), and its silence is all that a log at INFO shows.
    """
    for count, what, line in still.values():
        if count < IDLE:
            sentence = f"{what}, and no statistics after it: vLLM leaves them out at INFO while nothing is computed"
            return Answer(sentence, request="", verdict="unknown", evidence=(line,))
    return None


@finding("KVD203", "lookups-not-answered", Severity.HANG, on=["lookup_timeout"], fixes=["KVF015"])
def lookups_not_answered(case: Any, seen: Any) -> Answer | None:
    """The workers do not answer lookups, and every step of the scheduler waits for one.

    Setting: a shorter `lookup_timeout_ms`; and look why the worker's LMCache does not answer (KVD207).
    """
    if case.counts["lookup_timeout"] < 3:
        return None
    rank = seen.fields["rank"]
    return Answer(f"rank {rank} did not answer a lookup in time", request="")


@finding("KVD204", "server-does-not-answer", Severity.HANG, on=["mp_timeout", "mp_unhealthy"])
def server_does_not_answer(case: Any, seen: Any) -> Answer | None:
    """The LMCache server does not answer: vLLM goes on without the cache.

    Cause: no server at `lmcache.mp.host` and `lmcache.mp.port`, or it is overloaded, or has gone.

    Setting: start the server before vLLM, and give both the same port; look into the server's log.
    """
    what = seen.fields.get("what", "a ping")
    server = seen.fields.get("server")
    return Answer(f"{what} timed out{' at ' + server if server else ''}; the server is marked unhealthy", request="")


@finding("KVD205", "server-never-asked-again", Severity.HANG, on=[""], fixes=["KVF112"])
def server_never_asked_again(case: Any, seen: Any) -> Answer | None:
    """After one lookup that timed out the cache is off until vLLM is started again."""
    timed_out = case.counts["mp_timeout"]
    if not timed_out or case.counts["mp_healthy"] or case.releases.within("lmcache", ">=0.5.0,<0.5.6") is not True:
        return None
    return Answer(f"{timed_out} lookups timed out, and `LMCache server is healthy again` never comes", request="")


@finding("KVD206", "transfer-mode-mismatch", Severity.HANG, on=["no_handler"], fixes=["KVF902"])
def transfer_mode_mismatch(case: Any, seen: Any) -> Answer | None:
    """The server does not know the operation a worker asks for, and does not answer: the worker waits for 300 seconds.

    Cause: the server was started for one transfer mode, the worker chose another. The answer that would tell it is
    never sent.

    Setting: start the server with `--supported-transfer-mode auto`, or the worker with the mode of the server
    (`lmcache.mp.mp_transfer_mode`, `LMCACHE_MP_TRANSFER_MODE`); and the same LMCache release on both sides.
    """
    mode = case.memory.get("mode")
    return Answer(
        f"the server has no handler for {seen.fields['operation']}{'; its transfer mode is ' + mode if mode else ''}",
        request="",
    )


@note("transfer_mode")
def _note_mode(case: Any, seen: Any) -> None:
    """What KVD206 has to know."""
    case.memory["mode"] = seen.fields["mode"]


@finding("KVD207", "worker-without-lmcache", Severity.HANG, on=["degraded"], fixes=["KVF015"])
def worker_without_lmcache(case: Any, seen: Any) -> Answer | None:
    """LMCache failed to start in a process, which goes on without it; the scheduler is not told, and waits for it.

    Cause: what the line says. Every lookup then runs into its timeout.

    Setting: put right what LMCache says; it is at the beginning of the log.
    """
    f = seen.fields
    if "what" in f:
        return Answer(f"{f['what']}: {f['error'] or 'no reason given'}", request="")
    process, error, line = case.memory.get("raised", ("", "", None))
    if process != seen.process or not error:
        return Answer("it failed to start; the beginning of the line is not in the log", request="")
    return Answer(f"LMCache failed to start: {error}", request="", evidence=(line,))


@note("raised")
def _note_raised(case: Any, seen: Any) -> None:
    """What KVD207 has to know: where the error is a whole traceback, the line that tells of it begins before it."""
    f = seen.fields
    case.memory["raised"] = (seen.process, f"{f['type']}: {f['text']}" if f["text"] else f["type"], seen.evidence)


@finding("KVD208", "waits-for-load", Severity.HANG, on=["kv_waiting"], fixes=["KVF104", "KVF202"])
def waits_for_load(case: Any, seen: Any) -> Answer | None:
    """A request waits for a load for very many steps.

    Normal: some hundred steps, while a load is under way.
    """
    waits = case.memory.setdefault("waits", {})
    if len(waits) < 10_000 or seen.request in waits:
        count = waits[seen.request] = waits.get(seen.request, 0) + 1
        if count == POLLS:
            return Answer(f"still waits for its load after {count} steps")
    return None


@finding("KVD209", "start-waits-for-worker", Severity.HANG, on=["broadcast"])
def start_waits_for_worker(case: Any, seen: Any) -> Answer | None:
    """EngineCore waits for a worker that does not answer.

    Cause: the worker is busy or stuck: with the multi-process connector it waits for a server that is not there, or
    that does not know the worker's transfer mode (the server's log tells, KVD206).

    Setting: look whether the LMCache server runs, and at its log.

    Normal: once or twice, while a large model is compiled.
    """
    if case.counts["broadcast"] < 2:
        return None
    return Answer(f"{case.counts['broadcast']} times no worker took what EngineCore gave it in time", request="")


@finding("KVD210", "worker-forgotten", Severity.HANG, on=["reaped", "unregistered"], fixes=["KVF113"])
def worker_forgotten(case: Any, seen: Any) -> Answer | None:
    """The server has forgotten a worker, and refuses what it asks for.

    Setting: a longer `worker_registration_grace_seconds` of the server.
    """
    f = seen.fields
    if seen.name == "reaped":
        return Answer(f"worker {f['instance']} was silent for {f['silent']} s (pinged={f['pinged']})", request="")
    return Answer(f"worker {f['instance']} is not registered", request="")


@finding("KVD211", "lookups-given-up", Severity.SLOW, on=["lookup_given_up"], fixes=["KVF011"])
def lookups_given_up(case: Any, seen: Any) -> Answer | None:
    """Asynchronous lookups take too long and are given up. The next question about such a request kills EngineCore.

    Setting: a longer `lookup_timeout_ms`, or `enable_async_loading: false`.
    """
    return Answer(f"not answered after {seen.fields['seconds']} seconds, computed instead")
