"""An engine whose statistics say that requests run or wait, and that nothing is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import Evidence, Fields, LogLine

#: Intervals of vLLM's statistics (10 seconds each) without a token, with requests waiting.
IDLE = 3
#: Connectors of a decode engine, by which nothing comes that a request does not name.
BY_REQUEST = {"NixlConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"}
#: Per cent of the KV blocks in use, below which no request waits for blocks; of external hits, above which decode
#: computes no prompt.
ROOM, ALL = 80.0, 99.0
#: What waits: requests in the queue, a step, requests for the KV of prefill.
_QUEUE, _STEP, _PREFILL = "queue", "step", "prefill"


class _Still(dict[tuple[str, str], "tuple[int, str, Evidence, str]"]):
    """{engine: intervals without a token, what its statistics say, the last line, which of the rules it looks like}"""


@note("stats")
def _note_standstill(log: Diagnosis, line: LogLine) -> None:
    still = log.state(_Still)
    f = line.fields
    engine = _engine(line)
    if not (f["waiting"] or f["running"]) or float(f["prompt"]) or float(f["generation"]):
        still.pop(engine, None)
        return
    count = still[engine][0] + 1 if engine in still else 1
    what = f"Running {f['running']}, Waiting {f['waiting']}, no token"
    if engine in still or len(still) < 1000:
        looks_like = _PREFILL if _awaits_prefill(log, f) else _QUEUE if f["waiting"] else _STEP
        still[engine] = (count, what, line.evidence, looks_like)


@finding("KVD202", "nothing-moves", Severity.HANG, on=["stats", ""], symptom=True)
def nothing_moves(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests wait, and the engine computes nothing.

    Cause: a step that does not end, in a hook or on the device; or what a request at the head of the queue waits for
    does not come: a load that was never started or does not end, a lookup that is not answered, or blocks that are kept
    back. Look at the other findings; none: take `kvfix dump PID`.

    Setting: vLLM before 0.32 can lock asynchronous loads out of one another when blocks are short: fewer requests at
    once (`max_num_seqs`).

    Normal: an idle engine; a prefill or a compiler that takes a minute.
    """
    return _stands(log, line, _QUEUE)


@finding("KVD1196", "step-does-not-end", Severity.HANG, on=["stats", ""], symptom=True)
def step_does_not_end(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests run, none waits, and no token comes: a step of the engine does not end.

    Cause: a worker stands in a hook of the connector (a load or a transfer that waits for the other side), in a
    collective that another rank does not join, or on the device; or a compiler or a very long prefill runs. The stacks
    of the workers decide.

    Setting: `kvfix dump PID` (or `py-spy dump --pid` of each worker) while it stands: a hook names the connector, then
    look at the other side (prefill, store, server) and its log; all_reduce or broadcast: the rank whose stack differs.
    Then restart; without --kv-transfer-config it shows whether the connector is it.

    Good: what the stacks show.

    Normal: a prefill or a compiler that takes a minute.
    """
    return _stands(log, line, _STEP)


def _awaits_prefill(log: Diagnosis, fields: Fields) -> bool:
    """Whether it is a decode engine with room, on which everything waits for the KV that prefill holds.

    Of an engine that does not say its connector: all that wait are deferred, and all hits are external.
    """
    of_decode = log.who.connectors <= BY_REQUEST and "kv_producer" not in log.who.roles
    if not log.who.connectors:
        of_decode = fields.get("deferred") == fields["waiting"] and float(fields.get("external") or 0) > ALL
    return bool(of_decode and fields["waiting"] and not fields["running"] and float(fields.get("usage") or 0) < ROOM)


@finding("KVD1065", "decode-waits-for-prefill", Severity.HANG, on=["stats", ""], symptom=True)
def decode_waits_for_prefill(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Requests wait on a decode engine with free blocks: the KV that prefill holds for them does not come.

    Cause: their transfer was not begun, or its end was not reported: prefill died, or gave the blocks up before decode
    came; the handshake has no answer; a notification was lost. vLLM's scheduler has no time limit for it (0.33.0). What
    decides: prefill's log of that time (`Releasing expired KV blocks`, a traceback, a restart), and decode's with
    `VLLM_LOGGING_LEVEL=DEBUG`, which names the requests (`is still in WAITING_FOR_REMOTE_KVS state`).

    Setting: `nc -vz HOST PORT` from decode, with prefill's VLLM_NIXL_SIDE_CHANNEL_HOST and PORT; `kvfix dump PID`
    shows what the workers wait for. Then restart decode, and prefill if it died. `"kv_load_failure_policy":
    "recompute"` on decode ends the wait if the failure is reported.

    Good: prefill that stays, at an address of its own; a router that aborts on both sides.
    """
    return _stands(log, line, _PREFILL)


def _engine(line: LogLine) -> tuple[str, str]:
    return str(line.fields.get("engine", "")), line.process


def _stands(log: Diagnosis, line: LogLine | None, rule: str) -> Answer | None:
    """Whether an engine has computed nothing for so long, and looks like this finding."""
    still = log.state(_Still)
    if line is None:
        return _still_at_the_end(log, still, rule)
    count, what, _, looks_like = still.get(_engine(line), (0, "", None, ""))
    if looks_like != rule or count < IDLE:
        return None
    verdict = "violated" if rule == _QUEUE else "unknown"  # one step may take so long
    return Answer(f"{what} for {count} intervals", request="", verdict=verdict)


def _still_at_the_end(log: Diagnosis, still: _Still, rule: str) -> Answer | None:
    """An engine that computes nothing says so once; from then on vLLM has its statistics at DEBUG (loggers.py
    0.12.0:194 to 0.32.0:272), and its silence is all that a log at INFO shows.
    """
    for count, what, evidence, looks_like in still.values():
        if count < IDLE and looks_like == rule and not log.failures.ending:
            sentence = f"{what}, and no statistics after it: vLLM leaves them out at INFO while nothing is computed"
            return Answer(sentence, request="", verdict="unknown", evidence=(evidence,), note=True)
    return None
