"""Failures that no finding knows: the first error of a log whose engine died, and whose code raised it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_line import LogLine
    from kvfix_tools.diagnose.tracebacks import Frame

#: Consequences of a death, not its cause.
_ECHOES = (
    "EngineDeadError", "EngineGenerateError", "EngineCore encountered an issue", "EngineCore died",
    "Engine core initialization failed", "WorkerProc initialization failed", "cancelled", "Executor failed",
    "Worker failed with error", "CancelledError", "KeyboardInterrupt", "SystemExit", "BrokenPipeError",
    "collective_rpc should not be called on follower node",
)  # fmt: skip
#: What an engine says when it is dead.
_DEAD = re.compile(
    rb"EngineDeadError|ngine core initialization failed|WorkerProc initialization failed|EngineCore failed to start"
    rb"|EngineCore encountered a|(?:died|exited) unexpectedly|Worker proc |Shutting down due to|output_handler failed"
)
#: What all of those hold.
_DEATHS = (b"ngine", b"orker", b"died unexpectedly", b"Shutting down due to", b"output_handler failed")
#: Lines of an engine at work.
_WORK = frozenset({"asked", "stored", "retrieved", "storing", "mp_stored", "mp_retrieved", "mp_prefetched"})
#: Lines of an engine or a server that starts, in the same file again.
_STARTS = frozenset({"vllm_version", "creating", "transfer_mode", "up"})
#: Failures and processes that are kept in mind.
_MOST, _PROCESSES, _SHOWN = 200, 64, 8
#: {part of a file's path: whose code it is}. The first that fits counts.
_OWNERS = (
    ("/kvcached/", "kvcached"), ("/kvbm/", "Dynamo"), ("/nixl_connect/", "Dynamo"), ("/flashinfer/", "FlashInfer"),
    ("/huggingface_hub/", "Hugging Face's client"), ("/lmcache_ascend/", "LMCache"), ("/lmcache/", "LMCache"),
    ("/vllm_ascend/", "vLLM"), ("/vllm/", "vLLM"), ("/nixl", "the transport (NIXL)"),
    ("/mooncake", "the transport (Mooncake)"), ("/zmq/", "the transport (ZeroMQ)"),
    ("/redis/", "the store's client (Redis)"), ("/boto", "the store's client (S3)"), ("/aiohttp/", "an HTTP client"),
    ("/sglang/", "SGLang"), ("/vllm_router/", "the router (production-stack)"), ("/torch/", "torch or CUDA"),
    ("/triton/", "torch or CUDA"), ("/ray/", "Ray"), ("/transformers/", "transformers"), ("/python3.", "Python"),
    ("/asyncio/", "Python"), ("/dynamo/", "Dynamo"),
)  # fmt: skip
#: Files of the API server that only one request goes through.
_OF_A_REQUEST = ("/starlette/", "/fastapi/", "/serving")
#: Names of processes that end by an exception.
_ENGINES = ("EngineCore", "Worker", "VllmWorker", "RayWorker")
#: What the engine says of an exception of a worker, in the words that the exception had.
_IN_A_WORKER = re.compile(r"Worker failed with error '(?P<text>.*)', please check the stack trace")
HOOKS = frozenset({
    "create_connector", "ensure_kv_transfer_initialized", "register_kv_caches",
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished", "request_finished_all_groups", "_update_from_kv_xfer_finished",
    "handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished",
    "get_block_ids_with_load_errors",
})  # fmt: skip


class Failures:
    def __init__(self) -> None:
        #: Lines of failures that no finding and no record knows, the first ones.
        self.lines: list[LogLine] = []
        #: Exceptions of the log, known or not, each once.
        self.raised: list[LogLine] = []
        self._shown: set[tuple[object, ...]] = set()
        #: Whether an engine or a worker has logged that it is dead; its first line that says so.
        self.dead = False
        self.death: LogLine | None = None
        #: What the engine says of a worker's exception: all there is of it where the worker's own lines are missing.
        self.quoted: LogLine | None = None
        #: {process: its last line}
        self.last: dict[str, LogLine] = {}
        #: Files whose process was asked to end, and has not worked since.
        self._closing: set[str] = set()
        self._taken = 0
        self._worked = 0
        self._waited = 0
        self._at: list[int] = []

    def take(self, line: LogLine) -> None:
        self._taken += 1
        name = line.name
        if name in _STARTS:
            self._closing.discard(line.file)
        if name in _WORK or (name == "stats" and float(line.fields["generation"]) > 0):
            self._worked = self._taken
            self._closing.discard(line.file)
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
                self._closing.add(line.file)
        elif name == "broadcast":
            self._waited = self._taken
        elif name in ("fatal", "died"):
            self.dead = True
        if line.process in self.last or len(self.last) < _PROCESSES:
            self.last[line.process] = line

    def unknown(self, line: LogLine) -> None:
        """Keep a line that no finding knows."""
        if len(self.lines) < _MOST and _is_failure(line):
            self.lines.append(line)
            self._at.append(self._taken)

    @property
    def heading(self) -> LogLine | None:
        """Return the line that heads `first`: pydantic's count of what it refuses, or the end that C++ announces."""
        return next((line for line in self.lines if _is_heading(line) or _terminates(line)), None)

    def is_ending(self, line: LogLine) -> bool:
        """Return True if the process of this file was asked to end. Its errors are echoes then."""
        return line.file in self._closing

    @property
    def ending(self) -> bool:
        return bool(self._closing)

    @property
    def worked_since_wait(self) -> bool:
        """Whether the engine worked after the last time that it waited for a worker."""
        return self._worked > self._waited

    @property
    def first(self) -> LogLine | None:
        """What to report: of a dead engine the first exception, else the first error; None: the engine works."""
        after = [line for line, at in zip(self.lines, self._at, strict=True) if self.dead or at > self._worked]
        own = [line for line in after if line.name in ("raised", "died")] or after
        if own:
            first = next((line for line in own if not (_while_ending(line) or _is_heading(line))), own[0])
            what = own[own.index(first) + 1 :][:1] if _terminates(first) else []
            return next((line for line in what if line.body.lstrip().startswith(b"what():")), first)
        # A connector's exception that the engine survives is not its normal work either.
        return next((line for line in self.lines if line.name == "raised" and of_connector(line)), None)


def _quoted(line: LogLine) -> LogLine | None:
    """The worker's exception that this one of the engine quotes, without a class or frames; None: it quotes none."""
    text = str(line.fields["text"])
    found = _IN_A_WORKER.match(text) if text.startswith("Worker failed with error") else None
    if found is None or not found["text"]:
        return None
    fields = {**line.fields, "text": found["text"], "type": "", "class": "", "frames": [], "source": ""}
    return replace(line, fields=fields)


def is_cut(line: LogLine) -> bool:
    """Whether the log ends in this traceback, before the exception."""
    fields = line.fields
    return line.name == "raised" and bool(fields["frames"]) and not (fields["class"] or fields["text"])


def _is_heading(line: LogLine) -> bool:
    """Whether it only counts what pydantic refuses; each of it has a line of its own, below."""
    return line.name == "raised" and " validation error" in str(line.fields.get("text", ""))[:40]


def _terminates(line: LogLine) -> bool:
    """Whether C++ says that an exception ends the process; what it was stands below."""
    return line.name == "died" and b"terminate called after throwing" in line.body


def _while_ending(line: LogLine) -> bool:
    """Whether an object that was dropped raised it, which Python ignores: it comes after a failure, if there is one."""
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
        return fields["type"] not in _ECHOES and not text.startswith(_ECHOES)
    if line.name == "died":
        return True
    # What was in the step that failed: vLLM dumps it as an error, with words such as `num_corrupted_reqs=0`.
    is_dump = "dump_input.py" in fields["place"]
    # The API server prints this line above the exception that it has caught.
    is_heading = b"Engine Exception caught." in line.body
    if fields["logger"] == "vllm" and line.body[:1].isspace():  # of a traceback whose beginning is not here
        return False
    return fields["level"] in ("error", "critical") and not (is_dump or is_heading or _is_dead(line.body))


@lru_cache(maxsize=256)
def _is_dead(body: bytes) -> bool:
    return any(word in body for word in _DEATHS) and _DEAD.search(body) is not None


def of_connector(line: LogLine) -> bool:
    """Whether a hook of a connector, or its own code, raised it."""
    frames = line.fields["frames"]
    return any(frame[2] in HOOKS or "/lmcache/" in frame[0] or "kv_connector" in frame[0] for frame in frames[-12:])


def is_of_engine(line: LogLine) -> bool:
    """Return True if an engine, a worker or a connector raised it, and not the API server over one request."""
    frames = line.fields["frames"]
    paths = [f"/{frame[0]}" for frame in frames]
    if any(part in path for path in paths for part in _OF_A_REQUEST):
        return False
    return of_connector(line) or line.process.startswith(_ENGINES) or any("/vllm/" in path for path in paths)


def hook(frames: list[Frame]) -> str:
    """The connector hook that the exception left; "" if it left none."""
    return next((frame[2] for frame in frames if frame[2] in HOOKS), "")


def owner(frames: list[Frame]) -> str:
    """Whose code raised it, by the innermost frame."""
    if not frames:
        return ""
    for file, _, _ in reversed(frames):
        path = file.replace("\\", "/")
        for part, name in _OWNERS:
            if part in f"/{path}":
                return name
        if path.startswith("/"):
            return "code of your own"
    return "code whose path the log leaves out"  # `.../file.py`
