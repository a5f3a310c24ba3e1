"""Counts and settings of all lookups and stores of a log, which findings use at the end of the log."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from kvfix_tools.diagnose.findings import note

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: Minimum number of requests with a lookup for a finding; maximum number of requests, and of engines, to remember.
ENOUGH, _REQUESTS, _ENGINES = 10, 20_000, 64
#: Default of `chunk_size`, in every release.
CHUNK = 256
#: `kv_shape=(layers, 2, tokens of a chunk, heads, head size)` in 0.3.9 to 0.5.6.
_SHAPE = re.compile(r"kv_shape=\(\d+, \d+, (\d+)")
_ENGINE = re.compile(r"model_name='([^']*)'.*?world_size=(\d+).*?kv_dtype=([\w.]+)")
_SETTING = re.compile(r"'?(\w+)'?(?:: |=)('[^']*'|[^\s,{}()]+)")
_NOWHERE = re.compile(r"\(?'', '', 0, ''\)?")


class Lookups:
    """Counts and settings of the lookups of a log. Several lookups of one request count once."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self.longest = 0
        #: Longest hit in vLLM's own prefix cache.
        self.local = 0
        #: True if any lookup had a hit.
        self.hit = False
        self.loads = self.below = self.most = self.least = 0
        self.stored = 0
        self.askers: set[str] = set()
        self.storers: set[str] = set()
        self.chunk = 0
        self.settings: dict[str, str] = {}
        #: {(model, world size, dtype, chunk size) of a worker: its line}
        self.engines: dict[tuple[str, str, str, str], LogLine] = {}
        self.shared = self.empty = 0
        #: Processes of an engine whose PYTHONHASHSEED is not set.
        self.unseeded = 0

    @property
    def number(self) -> int:
        return len(self.requests)


class LookupsByFile(dict[str, Lookups]):
    """{file: the lookups in it}. Several files are the logs of several engines."""

    def __missing__(self, file: str) -> Lookups:
        return self.setdefault(file, Lookups())


def lookups_of(log: Diagnosis) -> Lookups:
    """Return the lookups of all files together."""
    return log.state(Lookups)


def _lookups_with(log: Diagnosis, line: LogLine) -> tuple[Lookups, Lookups]:
    """Return the lookups that a line belongs to: those of all files, and those of its file."""
    return lookups_of(log), log.state(LookupsByFile)[line.file]


@note("asked")
def _note_asked(log: Diagnosis, line: LogLine) -> None:
    if line.fields.get("hit") is not None:  # None: an asynchronous lookup without an answer yet
        for kept in _lookups_with(log, line):
            _note_lookup(kept, line)


def _note_lookup(kept: Lookups, line: LogLine) -> None:
    f = line.fields
    kept.longest = max(kept.longest, f["total"])
    kept.local = max(kept.local, f.get("computed") or 0)
    kept.hit = kept.hit or f["hit"] > 0
    if line.request in kept.requests or len(kept.requests) >= _REQUESTS:
        return
    kept.requests.add(line.request)
    kept.askers.add(line.process)
    if f.get("least") is not None and f["hit"] > 0:
        kept.below += 1
        kept.least, kept.most = f["least"], max(kept.most, f["hit"])
    kept.loads += f.get("least") is None and (f.get("need") or 0) > 0


@note("stored")
def _note_stored(log: Diagnosis, line: LogLine) -> None:
    for kept in _lookups_with(log, line) if line.fields["tokens"] else ():
        kept.stored += 1
        if len(kept.storers) < _ENGINES:
            kept.storers.add(line.process)


@note("hash_seed")
def _note_shared(log: Diagnosis, line: LogLine) -> None:
    for kept in _lookups_with(log, line):
        kept.unseeded += 1
        kept.shared += not line.fields["why"].startswith("Using builtin")


@note("engine_configured")
@note("configured")
def _note_settings(log: Diagnosis, line: LogLine) -> None:
    for kept in _lookups_with(log, line):
        kept.settings.update(_settings(line.fields["settings"]))
        if kept.settings.get("chunk_size", "").isdigit():
            kept.chunk = int(kept.settings["chunk_size"])
        kept.shared += kept.settings.get("remote_url", "None") != "None"


@lru_cache(maxsize=64)
def _settings(text: str) -> dict[str, str]:
    return {name: value.strip("'") for name, value in _SETTING.findall(text)}


@note("version")
def _note_engine(log: Diagnosis, line: LogLine) -> None:
    text, kept = line.body.decode("utf-8", "replace"), lookups_of(log)
    shape = _SHAPE.search(text)
    if shape is None:
        return
    kept.chunk = kept.chunk or int(shape[1])
    engine = _ENGINE.search(text)
    if engine is not None and len(kept.engines) < _ENGINES:
        kept.engines.setdefault((engine[1], engine[2], engine[3], shape[1]), line)


@note("peer_asked")
def _note_peer(log: Diagnosis, line: LogLine) -> None:
    lookups_of(log).empty += bool(_NOWHERE.search(line.fields["layout"]))
