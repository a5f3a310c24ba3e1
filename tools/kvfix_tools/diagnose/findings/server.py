"""The LMCache server, as its own log and its clients' tell of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.findings import Answer, Severity, finding, note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: How the server begins to tell of a handler that failed; the traceback stands below it, within so many lines.
_HANDLER = re.compile(
    r"Error (?:in blocking handler|handling (?:request RequestType\.|operation )(?P<operation>\w+))(?:: (?P<error>.+))?"
)
_BELOW = 120
#: Operations whose answer no client waits for: they fail when a worker has gone.
_UNASKED = frozenset({"end_session"})


class Server:
    """mode: the transfer mode of the server. handler: the line that announces the traceback of a handler."""

    def __init__(self) -> None:
        self.mode = ""
        self.handler: LogLine | None = None


@finding("KVD116", "server-silent-at-start", Severity.CRASH, on=["raised"], symptom=True)
def server_silent_at_start(log: Diagnosis, line: LogLine) -> Answer | None:
    """A worker could not register with the LMCache server, and vLLM does not start.

    Cause: there is no server at `lmcache.mp.host` and `lmcache.mp.port`; or there is, and it failed at the registration
    (KVD212) or does not know the operation (KVD206). Then its own log alone tells why: it sends no answer.

    Setting: `lmcache server --supported-transfer-mode auto`, started before vLLM and of the same release of
    LMCache. Containers: both with `--network host --ipc host --gpus all`. If the server runs, `grep 'Error
    handling' SERVER.log`.

    Good: what the server's log says, put right; no release up to 0.5.6 sends its error to the client.
    """
    if line.fields["meaning"] != "server_silent":
        return None
    server = line.fields.get("server")
    what = f"no server at {server}" if server else f"no answer to {line.fields.get('operation', 'a question')}"
    return Answer(f"{what}: {line.fields['text'][:160]}", request="")


@finding("KVD204", "server-does-not-answer", Severity.HANG, on=["mp_timeout", "mp_unhealthy"], symptom=True)
def server_does_not_answer(log: Diagnosis, line: LogLine) -> Answer | None:
    """The LMCache server does not answer: vLLM goes on without the cache.

    Cause: no server at `lmcache.mp.host` and `lmcache.mp.port`, or it is overloaded, or has gone.

    Setting: `lmcache server` started again, at the host and port of `lmcache.mp.host` and `lmcache.mp.port`: the
    engine finds it by itself. `dmesg -T | grep -i 'killed process'` says whether it was killed for memory.

    Good: a server that is started again by itself, and LMCache 0.5.6, where a lookup that timed out does not switch the
    cache off for good (KVD205).
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

    Cause: the server was started for one transfer mode, the worker chose another; or they are of different releases of
    LMCache. Operations that begin with CB_ are CacheBlend's: their names differ by release, and only a server with
    `--engine-type blend` has them. The answer that would tell it is never sent.

    Setting: `lmcache server --supported-transfer-mode auto`, or the worker with the mode of the server
    (`lmcache.mp.mp_transfer_mode`, LMCACHE_MP_TRANSFER_MODE); the same LMCache release on both sides. Operations
    that begin with CB_: a server without `--engine-type blend`, or a client of its release.

    Good: the same, in both units; no release up to 0.5.6 answers what it does not know.
    """
    mode = log.state(Server).mode
    return Answer(
        f"the server has no handler for {line.fields['operation']}{'; its transfer mode is ' + mode if mode else ''}",
        request="",
    )


@note("transfer_mode")
def _note_mode(log: Diagnosis, line: LogLine) -> None:
    log.state(Server).mode = line.fields["mode"]


@finding("KVD210", "worker-forgotten", Severity.HANG, on=["reaped", "unregistered", ""])
def worker_forgotten(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The server has forgotten a worker, and refuses what it asks for.

    Setting: a longer `worker_registration_grace_seconds` of the server.

    Normal: `No registered GPU context found`, where the same worker has unregistered before.
    """
    if line is None:
        if not log.counts["good_bye_of_none"] or log.counts["good_bye"]:
            return None
        return Answer("a worker that the server does not know any more says good-bye", "", "unknown")
    f = line.fields
    if line.name == "unregistered":
        return Answer(f"worker {f['instance']} is not registered", request="")
    if f["pinged"] == "True":
        return None  # KVD214
    return Answer(f"worker {f['instance']} was silent for {f['silent']} s and has never pinged", request="")


@finding("KVD214", "worker-fell-silent", Severity.HANG, on=["reaped"])
def worker_fell_silent(log: Diagnosis, line: LogLine) -> Answer | None:
    """A worker that had pinged the server fell silent, and the server dropped it.

    Cause: the worker's process has ended, hangs (a thread holds Python's global lock, as on ROCm: KVD922), or was
    stopped; the server drops it after `worker_reap_timeout_seconds` (120). A worker that lives on is refused from then.

    Setting: `py-spy dump --pid PID` of the worker, if it still runs; then restart vLLM, and look at vLLM's log of
    that time. `--worker-reap-timeout-seconds 0` of the server keeps live workers registered.

    Good: what made the worker silent, put right; no release lets a worker that hangs go on.

    Normal: a vLLM that was stopped or killed.
    """
    f = line.fields
    if f["pinged"] != "True":
        return None  # KVD210
    return Answer(f"worker {f['instance']} was silent for {f['silent']} s", request="", verdict="unknown")


@finding("KVD212", "server-handler-fails", Severity.HANG, on=["logged", "raised", ""])
def server_handler_fails(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The server failed at a request and sent no answer: the client waits until its own timeout.

    Cause: a handler of the server raised; what is wrong is the last line of its traceback. No release tells the client
    (0.5.6), which can only say that it timed out.

    Setting: `grep -A120 'Error handling' SERVER.log` shows the traceback: put right what its last line says. Then
    restart the server, and after it vLLM. `lmcache.mp.mq_timeout` in kv_connector_extra_config makes the client
    give up earlier.

    Good: what the traceback's last line says; no release up to 0.5.6 sends the error to the client.
    """
    server = log.state(Server)
    head = server.handler
    if line is None:
        return Answer(head.evidence.text[:160], request="", evidence=(head.evidence,)) if head is not None else None
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
    """The LMCache server answered that a load has failed. vLLM ends the request with an error, or computes it again.

    Cause: the server knows: a chunk went between lookup and load (`Some keys not found during retrieve!`), a worker is
    not registered (KVD210), or the copy failed (`Cannot retrieve keys due to exception`). vLLM's
    `kv_load_failure_policy` is `fail` unless it is set.

    Setting: `"kv_load_failure_policy":"recompute"` in --kv-transfer-config; then the server's log at this time, with
    `kvfix-diagnose ENGINE.log SERVER.log`; a larger `--l1-size-gb` if chunks are missing.

    Good: what the server's log names.
    """
    if line.fields["what"] != "retrieve" or log.releases.within("lmcache", "<0.5.5") is not False:
        return None  # KVD301
    return Answer("its load from the server failed")


@finding("KVD272", "store-to-server-failed", Severity.SLOW, on=["mp_failed"])
def store_to_server_failed(log: Diagnosis, line: LogLine) -> Answer | None:
    """The LMCache server answered that a store has failed: this KV is not in the cache, the request is right.

    Cause: the server knows: the worker is not registered (`Rejecting STORE`, KVD210), the blocks do not fit its layout
    (`STORE block ID underflow`), or the copy failed (`Cannot store keys due to exception`).

    Setting: `kvfix-diagnose ENGINE.log SERVER.log` shows what the server says at this time. Restart vLLM if the
    server was restarted without it.

    Good: what the server's log names.
    """
    return Answer("its store failed at the server") if line.fields["what"] == "store" else None
