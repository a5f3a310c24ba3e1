"""Findings about the LMCache server, from its own log and from the logs of its clients."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.findings import Answer, Severity, finding

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: First line of the server about a failed handler, and the maximum number of lines until its traceback.
_HANDLER = re.compile(
    r"Error (?:in blocking handler|handling (?:request RequestType\.|operation )(?P<operation>\w+))(?:: (?P<error>.+))?"
)
_BELOW = 120
#: Operations whose answer no client needs. They fail after a worker has ended.
_UNASKED = frozenset({"end_session"})


class Server:
    """handler: the line that announces the traceback of a handler."""

    handler: LogLine | None = None


@finding("KVD116", "server-silent-at-start", Severity.CRASH, on=["server_silent"], symptom=True)
def server_silent_at_start(log: Diagnosis, line: LogLine) -> Answer | None:
    """vLLM does not start, because a worker could not register with the LMCache server.

    Cause: no server runs at `lmcache.mp.host` and `lmcache.mp.port`. Or the server failed at the registration (KVD212)
    or does not know the operation (KVD206), and sends no answer: then only the server's log shows the cause.

    Setting: `lmcache server --supported-transfer-mode auto`, started before vLLM, in the same release of LMCache. Start
    both containers with `--network host --ipc host --gpus all`. If the server runs, `grep 'Error handling' SERVER.log`.

    Good: a fix of the error in the server's log. No release up to 0.5.6 sends this error to the client.
    """
    server = line.fields.get("server")
    what = f"no server at {server}" if server else f"no answer to {line.fields.get('operation', 'a request')}"
    return Answer(f"{what}: {line.fields['text'][:160]}", request="")


@finding("KVD204", "server-does-not-answer", Severity.HANG, on=["mp_timeout", "mp_unhealthy"], symptom=True)
def server_does_not_answer(log: Diagnosis, line: LogLine) -> Answer | None:
    """vLLM runs without the cache, because the LMCache server does not answer.

    Cause: no server runs at `lmcache.mp.host` and `lmcache.mp.port`, or the server is overloaded or has died.

    Setting: `lmcache server` restarted at the host and port of `lmcache.mp.host` and `lmcache.mp.port`. The engine
    reconnects without a restart. `dmesg -T | grep -i 'killed process'` shows if the server was killed for memory.

    Good: a supervisor that restarts the server, and LMCache 0.5.6, in which a lookup timeout does not disable the cache
    permanently (KVD205).
    """
    what = line.fields.get("what", "a ping")
    server = line.fields.get("server")
    return Answer(f"{what} timed out{' at ' + server if server else ''}; the server is marked unhealthy")


@finding("KVD205", "server-never-asked-again", Severity.HANG, on=[""])
def server_never_asked_again(log: Diagnosis, line: LogLine) -> Answer | None:
    """The cache is off until vLLM restarts, because one lookup timed out."""
    timed_out = log.counts["mp_timeout"]
    if not timed_out or log.counts["mp_healthy"] or log.releases.within("lmcache", ">=0.5.0,<0.5.6") is not True:
        return None
    return Answer(f"{timed_out} lookups timed out, and no line says `LMCache server is healthy again`")


@finding("KVD206", "transfer-mode-mismatch", Severity.HANG, on=["no_handler"])
def transfer_mode_mismatch(log: Diagnosis, line: LogLine) -> Answer | None:
    """A worker waits 300 seconds, because the server does not know its operation and does not answer.

    Cause: the server and the worker have different transfer modes or different releases of LMCache. Operations CB_...
    are CacheBlend's. Their names differ by release, and only a server with `--engine-type blend` has them.

    Setting: `lmcache server --supported-transfer-mode auto`, or set the worker's mode to the server's
    (`lmcache.mp.mp_transfer_mode`, LMCACHE_MP_TRANSFER_MODE). Install the same LMCache release on both sides. For
    operations CB_..., start the server without `--engine-type blend`, or use a client of the server's release.

    Good: these settings for server and worker. No release up to 0.5.6 answers an unknown operation.
    """
    mode = f"; its transfer mode is {log.last['transfer_mode'].fields['mode']}" if log.counts["transfer_mode"] else ""
    return Answer(f"the server has no handler for {line.fields['operation']}{mode}")


@finding("KVD210", "worker-forgotten", Severity.HANG, on=["reaped", "unregistered", ""])
def worker_forgotten(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The server refuses all requests of a worker, because it has removed the worker's registration.

    Setting: `worker_registration_grace_seconds` of the server longer.

    Normal: `No registered GPU context found` after the worker has unregistered.
    """
    if line is None:
        if not log.counts["good_bye_of_none"] or log.counts["good_bye"]:
            return None
        return Answer("a worker unregisters, but the server does not know the worker any more", "", "unknown")
    f = line.fields
    if line.name == "unregistered":
        return Answer(f"worker {f['instance']} is not registered")
    if f["pinged"] == "True":
        return None  # KVD214
    return Answer(f"worker {f['instance']} was silent for {f['silent']} s and has never pinged")


@finding("KVD214", "worker-fell-silent", Severity.HANG, on=["reaped"])
def worker_fell_silent(log: Diagnosis, line: LogLine) -> Answer | None:
    """The server refuses all requests of a worker, because the worker stopped its pings and the server removed it.

    Cause: the worker has ended, hangs, or was stopped. On ROCm a thread may hold Python's global lock (KVD922). The
    server removes a silent worker after `worker_reap_timeout_seconds` (120).

    Setting: `py-spy dump --pid PID` of the worker, if it still runs. Then restart vLLM, and read vLLM's log of that
    time. `lmcache server --worker-reap-timeout-seconds 0` keeps live workers registered.

    Good: a fix of the cause that made the worker silent. No release continues with a worker that was removed.

    Normal: a vLLM that was stopped or killed.
    """
    f = line.fields
    if f["pinged"] != "True":
        return None  # KVD210
    return Answer(f"worker {f['instance']} was silent for {f['silent']} s", verdict="unknown")


@finding("KVD212", "server-handler-fails", Severity.HANG, on=["logged", "raised", ""])
def server_handler_fails(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A client waits until its timeout, because the server failed at a request and sent no answer.

    Cause: a handler of the server raised. The last line of its traceback shows the error. No release up to 0.5.6 sends
    the error to the client, which logs only a timeout.

    Setting: `grep -A120 'Error handling' SERVER.log` shows the traceback. Fix the error in its last line. Then restart
    the server, and after it vLLM. `lmcache.mp.mq_timeout` in kv_connector_extra_config shortens the client's wait.

    Good: a fix of the error in the last line of the traceback.
    """
    server = log.state(Server)
    head = server.handler
    if line is None:
        return Answer(head.evidence.text[:160], evidence=(head.evidence,)) if head is not None else None
    if line.name == "logged":
        found = _HANDLER.search(line.evidence.text) if line.body.find(b"andl") >= 0 else None
        if found is None:
            return None
        server.handler = None if found["error"] else line
        return _failed_handler(line, found["error"]) if found["error"] else None
    if head is None or line.process or head.file != line.file or not 0 < line.number - head.number < _BELOW:
        return None
    server.handler = None
    if any(frame[2] in _UNASKED for frame in line.fields["frames"]):
        return None
    fields = line.fields
    if any(each.look(log, line) for each in problems.at(line)):
        return None
    return _failed_handler(head, f"{fields['type']}: {fields['text']}".rstrip(": "))


def _failed_handler(head: LogLine, error: str) -> Answer:
    found = _HANDLER.search(head.evidence.text)
    operation = (found["operation"] if found is not None else None) or "a request"
    return Answer(f"{operation.lower()}: {error[:200]}", request="", evidence=(head.evidence,))


@finding("KVD271", "load-from-server-failed", Severity.SLOW, on=["mp_failed"])
def load_from_server_failed(log: Diagnosis, line: LogLine) -> Answer | None:
    """A request ends with an error or is computed again, because a load from the LMCache server failed.

    Cause: the server's log shows the cause. A chunk was evicted between lookup and load (`Some keys not found during
    retrieve!`), a worker is not registered (KVD210), or the copy failed (`Cannot retrieve keys due to exception`). The
    default of vLLM's `kv_load_failure_policy` is `fail`.

    Setting: `"kv_load_failure_policy":"recompute"` in --kv-transfer-config. Then run `kvfix-diagnose ENGINE.log
    SERVER.log`. If chunks are missing, raise `--l1-size-gb` of the server.

    Good: a fix of the cause in the server's log.
    """
    if line.fields["what"] != "retrieve" or log.releases.within("lmcache", "<0.5.5") is not False:
        return None  # KVD301
    return Answer("the load of this request from the server failed")


@finding("KVD272", "store-to-server-failed", Severity.SLOW, on=["mp_failed"], symptom=True)
def store_to_server_failed(log: Diagnosis, line: LogLine) -> Answer | None:
    """Later requests have no hits, because a store to the LMCache server failed. The output of this request is right.

    Cause: the server's log shows the cause. The worker is not registered (`Rejecting STORE`, KVD210), the blocks do not
    match the server's layout (`STORE block ID underflow`), or the copy failed (`Cannot store keys due to exception`).

    Setting: `kvfix-diagnose ENGINE.log SERVER.log` shows the server's error. If the server was restarted without vLLM,
    restart vLLM.

    Good: a fix of the cause in the server's log.
    """
    return Answer("the store of this request failed at the server") if line.fields["what"] == "store" else None
