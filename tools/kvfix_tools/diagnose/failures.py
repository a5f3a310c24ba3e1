"""Find the failures of a log that no finding explains, and the package whose code raised the first error."""

import re
from functools import lru_cache

from msgspec.structs import replace

from kvfix.engine_state import places
from kvfix_tools.diagnose.grammar import TABLES
from kvfix_tools.diagnose.log_line import LogLine
from kvfix_tools.diagnose.tracebacks import Frame

#: Names of functions that only connectors have, and of vLLM's functions that call a connector.
HOOKS = frozenset((*places.HOOKS, *places.LAYER_HOOKS)).difference(("on_new_request", "reset_cache", "shutdown")) | {
    "create_connector", "ensure_kv_transfer_initialized", "_update_from_kv_xfer_finished",
}  # fmt: skip
#: Messages that report that an engine or a worker is dead.
_DEAD = re.compile(
    rb"EngineDeadError|ngine core initialization failed|WorkerProc initialization failed|EngineCore failed to start"
    rb"|EngineCore encountered a|(?:died|exited) unexpectedly|Worker proc |Shutting down due to|output_handler failed"
)
#: Kinds of lines that an engine writes only while it works on requests.
_WORK = frozenset({"asked", "stored", "retrieved", "storing", "mp_stored", "mp_retrieved", "mp_prefetched"})
#: Kinds of lines that an engine or a server writes when it starts. A file may contain several starts.
_STARTS = frozenset({"vllm_version", "creating", "transfer_mode", "up"})
#: kvfix keeps at most _MOST failures, _PROCESSES processes and _SHOWN exceptions.
_MOST, _PROCESSES, _SHOWN = 200, 64, 8
#: Parts of paths of the API server's code. An exception in this code concerns only one request.
_OF_A_REQUEST = ("/starlette/", "/fastapi/", "/serving")
_ENGINES = ("EngineCore", "Worker", "VllmWorker", "RayWorker")
#: The engine's message about a failed worker, which quotes the text of the worker's exception.
_IN_A_WORKER = re.compile(r"Worker failed with error '(?P<text>.*)', please check the stack trace")


class Failures:
    def __init__(self) -> None:
        #: The first lines about failures that no finding and no known problem explains.
        self.lines: list[LogLine] = []
        #: The first exceptions of the log, without repeats, even exceptions that a finding explains.
        self.raised: list[LogLine] = []
        self._shown: set[tuple[object, ...]] = set()
        #: `dead` is True if the log reports that an engine or a worker died. `death` is the first line about a death.
        self.dead = False
        self.death: LogLine | None = None
        #: The engine's line that quotes a worker's exception, for logs that lack the worker's own lines.
        self.quoted: LogLine | None = None
        self.last: dict[str, LogLine] = {}
        #: {log file of a process that is shutting down: time of the first line about the shutdown, or None}
        self.closing: dict[str, float | None] = {}
        #: Number of failures in `lines` before the engine last worked on requests. The engine survived these failures.
        self._survived = 0
        #: True if the engine has worked on requests after its last message about waiting for a worker.
        self.worked_since_wait = False

    def take(self, line: LogLine) -> None:
        name = line.name
        works = name in _WORK or (name == "stats" and float(line.fields["generation"]) > 0)
        if self.closing and line.file in self.closing and (works or name in _STARTS):
            # The process works again, unless Ray printed the line late. A late line has a time before the shutdown.
            since = self.closing[line.file]
            is_first = name in ("vllm_version", "up")  # Ray's workers never write these lines
            if is_first or since is None or line.time is None or line.time >= since:
                del self.closing[line.file]
        if works:
            self._survived, self.worked_since_wait = len(self.lines), True
        elif self.is_ending(line):
            pass
        elif name in ("raised", "logged"):
            if _is_dead(line.body):
                self.dead, self.death = True, self.death or line
            if name == "raised" and self.quoted is None:
                self.quoted = _quoted(line)
            if name == "raised" and len(self.raised) < _SHOWN:
                key = (line.fields["class"], line.fields["text"][:80], *line.fields["frames"][-1:])
                if key not in self._shown and _is_failure(line):
                    self._shown.add(key)
                    self.raised.append(line)
        elif name == "closing":
            if not self.dead:
                self.closing.setdefault(line.file, line.time)
        elif name == "broadcast":
            self.worked_since_wait = False
        elif name in ("fatal", "died"):
            self.dead = True
        if line.process in self.last or len(self.last) < _PROCESSES:
            self.last[line.process] = line

    def unknown(self, line: LogLine) -> None:
        """Keep a line about a failure that no finding explains."""
        if len(self.lines) < _MOST and _is_failure(line):
            self.lines.append(line)

    @property
    def heading(self) -> LogLine | None:
        """The first line that announces an error of pydantic or C++ but does not show the error, or None."""
        return next((line for line in self.lines if _is_heading(line) or _terminates(line)), None)

    def is_ending(self, line: LogLine) -> bool:
        """Return True if this line's process is shutting down. The shutdown causes the process's later errors."""
        return line.file in self.closing

    @property
    def first(self) -> LogLine | None:
        """The first exception, or else the first error. Ignore errors that a living engine has survived."""
        after = self.lines if self.dead else self.lines[self._survived :]
        own = [line for line in after if line.name in ("raised", "died")] or after
        if own:
            first = next((line for line in own if not (_while_ending(line) or _is_heading(line))), own[0])
            what = own[own.index(first) + 1 :][:1] if _terminates(first) else []
            return next((line for line in what if line.body.lstrip().startswith(b"what():")), first)
        # A connector's exception is a failure even if the engine survives the exception.
        return next((line for line in self.lines if line.name == "raised" and of_connector(line)), None)


def _quoted(line: LogLine) -> LogLine | None:
    """Return this engine line with only the quoted text of the worker's exception, or None if the line quotes none."""
    text = str(line.fields["text"])
    found = _IN_A_WORKER.match(text) if text.startswith("Worker failed with error") else None
    if found is None or not found["text"]:
        return None
    fields = {**line.fields, "text": found["text"], "type": "", "class": "", "frames": [], "source": ""}
    return replace(line, fields=fields)


def is_cut(line: LogLine) -> bool:
    """Return True if the log ends inside this traceback, so that the line with the exception is missing."""
    fields = line.fields
    return line.name == "raised" and bool(fields["frames"]) and not (fields["class"] or fields["text"])


def _is_heading(line: LogLine) -> bool:
    """Return True if the line has only the number of pydantic's errors. Later lines show each error."""
    return line.name == "raised" and " validation error" in str(line.fields.get("text", ""))[:40]


def _terminates(line: LogLine) -> bool:
    """Return True if C++ reports that an exception ends the process. The next line shows the exception."""
    return line.name == "died" and b"terminate called after throwing" in line.body


def _while_ending(line: LogLine) -> bool:
    """Return True for an exception in `__del__`, which Python ignores and which usually follows another failure."""
    frames = line.fields.get("frames") or [("", 0, "")]
    return bool(frames[0][2] == "__del__")


def _is_failure(line: LogLine) -> bool:
    fields = line.fields
    if line.name == "stack":
        return False
    if line.name == "raised":
        text = fields["text"]
        if fields["class"].endswith("Warning") or (fields["level"] == "warning" and not of_connector(line)):
            return False
        return fields["type"] not in TABLES.echoes and not text.startswith(TABLES.echoes)
    if line.name == "died":
        return True
    if fields["level"] not in ("error", "critical") or _is_dead(line.body):
        return False
    if fields["logger"] == "vllm" and line.body[:1].isspace():  # a line of a traceback whose beginning is missing
        return False
    # vLLM's dump of a failed step's input, and the API server's line before an exception, are no failures.
    return "dump_input.py" not in fields["place"] and b"Engine Exception caught." not in line.body


@lru_cache(maxsize=256)
def _is_dead(body: bytes) -> bool:
    return _DEAD.search(body) is not None


def of_connector(line: LogLine) -> bool:
    """Return True if the exception was raised in a connector hook or in other code of a connector."""
    frames = line.fields["frames"]
    return any(frame[2] in HOOKS or "/lmcache/" in frame[0] or "kv_connector" in frame[0] for frame in frames[-12:])


def is_of_engine(line: LogLine) -> bool:
    """Return True if an engine, a worker or a connector raised the exception, and False if the API server did."""
    paths = [f"/{frame[0]}" for frame in line.fields["frames"]]
    if any(part in path for path in paths for part in _OF_A_REQUEST):
        return False
    return of_connector(line) or line.process.startswith(_ENGINES) or any("/vllm/" in path for path in paths)


def hook(frames: list[Frame]) -> str:
    """Return the outermost connector hook in the traceback, or "" if no frame is a hook."""
    return next((frame[2] for frame in frames if frame[2] in HOOKS), "")


def owner(frames: list[Frame]) -> str:
    """Return the innermost frame's package, or "your own code" if unknown. Skip unknown frames with relative paths."""
    if not frames:
        return ""
    for file, _, _ in reversed(frames):
        path = file.replace("\\", "/")
        for part, name in TABLES.owners.items():
            if part in f"/{path}":
                return name
        if path.startswith("/"):
            return "your own code"
    return "code whose path is not in the log"  # every frame has only a path like `.../file.py`
