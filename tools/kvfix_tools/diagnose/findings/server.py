"""Find problems of the LMCache server, in the server's log and in the logs of the server's clients."""

import re

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Answer, Answers, decides, finding
from kvfix_tools.diagnose.log_line import LogLine

#: The server's first line about a failed handler. The traceback ends fewer than _BELOW lines below this line.
_HANDLER = re.compile(
    r"Error (?:in blocking handler|handling (?:request RequestType\.|operation )(?P<operation>\w+))(?:: (?P<error>.+))?"
)
_BELOW = 120
#: Functions whose result no client needs. kvfix does not report a failure inside one of these functions.
_UNASKED = frozenset({"end_session"})


class Server:
    """Notes about the last lines of a server's log. `handler`: the line before a failed handler's traceback."""

    handler: LogLine | None = None


@finding
def server_does_not_answer(log: Diagnosis, line: LogLine) -> Answer | None:
    what = line.fields.get("what", "a ping")
    server = line.fields.get("server")
    return Answer(f"{what} timed out{' at ' + server if server else ''}; the server is marked unhealthy")


@finding
def server_never_asked_again(log: Diagnosis, line: LogLine) -> Answer | None:
    timed_out = log.counts["mp_timeout"]
    if not timed_out or log.counts["mp_healthy"] or log.releases.within("lmcache", ">=0.5.0,<0.5.6") is not True:
        return None
    return Answer(f"{timed_out} lookups timed out, and no line says `LMCache server is healthy again`")


@finding
def transfer_mode_mismatch(log: Diagnosis, line: LogLine) -> Answer | None:
    mode = f" in transfer mode {log.last['transfer_mode'].fields['mode']}" if log.counts["transfer_mode"] else ""
    return Answer(f"the server{mode} has no handler for {line.fields['operation']}")


@decides("worker-forgotten", "worker-fell-silent")
def worker_removed(log: Diagnosis, line: LogLine | None) -> Answers:
    f = line.fields if line is not None else {}
    if line is None:
        if log.counts["good_bye_of_none"] and not log.counts["good_bye"]:
            sentence = "a worker unregisters, but the server does not know the worker any more"
            yield "worker-forgotten", Answer(sentence, "", sure=False)
    elif line.name == "unregistered":
        yield "worker-forgotten", Answer(f"worker {f['instance']} is not registered")
    elif f.get("pinged") == "True":
        yield "worker-fell-silent", Answer(f"worker {f['instance']} was silent for {f['silent']} s", sure=False)
    else:
        yield "worker-forgotten", Answer(f"worker {f['instance']} was silent for {f['silent']} s and has never pinged")


@finding
def server_handler_fails(log: Diagnosis, line: LogLine | None) -> Answer | None:
    server = log.state(Server)
    head = server.handler
    if line is None:
        return Answer(head.evidence.text[:160], evidence=(head,)) if head is not None else None
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
    return Answer(f"{operation.lower()}: {error[:200]}", "", evidence=(head,))


@decides("load-from-server-failed", "store-to-server-failed")
def failed_at_server(log: Diagnosis, line: LogLine) -> Answers:
    if line.fields["what"] == "store":
        yield "store-to-server-failed", Answer("the store of this request failed at the server")
    elif log.releases.within("lmcache", "<0.5.5") is False:  # for LMCache before 0.5.5, KVD301 reports the failure
        yield "load-from-server-failed", Answer("the load of this request from the server failed")
