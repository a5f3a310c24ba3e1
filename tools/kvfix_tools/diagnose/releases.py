"""Find the connectors, roles and settings that a log names, and the releases that wrote the log.

If a log does not name the releases, kvfix narrows the possible releases. For LMCache, kvfix uses the line
numbers of logging statements. For vLLM, kvfix uses the place that logs EngineCore's death, and files in tracebacks.
"""

import re
from collections import defaultdict
from functools import lru_cache
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import VERSION_PATTERN, Version

from kvfix.applicability import fingerprints
from kvfix_tools.diagnose import statements
from kvfix_tools.diagnose.grammar import MESSAGES, RELEASE_IN, TABLES
from kvfix_tools.diagnose.log_line import LogLine, statement_place

#: The first vLLM release with KV connectors.
_FIRST = Version("0.6")
_VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)

#: core.py (vLLM 0.9.2 to 0.33.0) logs a failed start this many lines above the statement that logs EngineCore's death.
_BEFORE = 2
#: Kinds of lines that EngineCore logs when it dies.
_DEATHS = ("fatal", "raised")


class Releases:
    def __init__(self) -> None:
        self.file = ""
        #: For each (distribution, log file), the releases that the file names, in order.
        self._named: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self._candidates: frozenset[str] = frozenset()
        #: For each log file, the vLLM releases that match the code locations in the file.
        self._placed: dict[str, frozenset[str]] = {}
        #: Kinds of lines that may still show a release. For LMCache, only the first line of each kind counts.
        self.awaited = {message.name for message in MESSAGES if message.source == "lmcache"} | {*RELEASE_IN, *_DEATHS}

    def name(self, releases: dict[str, Any], file: str) -> None:
        """Keep the releases, {distribution: release}, that this log file names."""
        for dist in ("lmcache", "vllm"):
            release = _public(str(releases.get(dist))[:64].partition("-g")[0])  # a checkout reports 0.5.6-g3e11e108
            # A build from a checkout without tags always reports 0.1.dev1.
            if release is not None and not (dist == "vllm" and Version(release) < _FIRST):
                named = self._named[dist, file]
                named.pop(release, None)
                named[release] = None

    def take(self, line: LogLine) -> None:
        """Narrow the possible releases by a line whose kind is in `awaited`."""
        if line.name == "version" or line.name in RELEASE_IN:
            self.name(line.fields, line.file)
        elif line.name in _DEATHS:
            frames = line.fields.get("frames", ())
            for found in (_of_statement(line.fields.get("place", "")), *(_of_file(frame[0]) for frame in frames)):
                if found:
                    self._placed[line.file] = self._placed.get(line.file, found) & found or self._placed[line.file]
        elif (at := statement_place(line.body)) is not None:
            self.awaited.remove(line.name)
            found = statements.releases_at(line.name, *at)
            # If two releases wrote the log, the lines of the first release decide.
            self._candidates = (self._candidates & found or self._candidates) if self._candidates else found

    def placed(self, file: str | None = None) -> list[str]:
        """Return the vLLM releases, oldest first, that fit the code locations in this file, or else in any file."""
        own = self._placed.get(self.file if file is None else file)
        return sorted(own or frozenset[str]().union(*self._placed.values()), key=Version)

    def named(self, dist: str) -> list[str]:
        """Return all releases of a distribution that any log file names."""
        return sorted({release for (of, _), many in self._named.items() if of == dist for release in many})

    def running(self) -> dict[str, str]:
        """Return {distribution: last release that the current file named}, because a log may contain an upgrade."""
        return {dist: next(reversed(own)) for (dist, file), own in self._named.items() if own and file == self.file}

    @property
    def candidates(self) -> list[str]:
        """The LMCache releases, oldest first, that match the line numbers of log statements, or [] if unknown."""
        return sorted(self._candidates, key=Version)

    def one(self, dist: str, file: str | None = None) -> str | None:
        """Return the last release that the file (default: the current file) names, or None if no release is known.

        If the file names no release, return the only release that other files name or that the code locations match.
        """
        possible = self._possible(dist, file)
        return possible[0] if len(possible) == 1 else None

    def _possible(self, dist: str, file: str | None) -> list[str]:
        """Return the releases that may have written the file, or [] if unknown or if other files name several."""
        own = self._named.get((dist, self.file if file is None else file))
        if own:
            return [next(reversed(own))]
        others = self.named(dist)
        if others:
            return others if len(others) == 1 else []
        return self.candidates if dist == "lmcache" else self.placed(file)

    @property
    def too_old(self) -> str:
        """A note if the log's LMCache release is older than all releases that kvfix knows, else ""."""
        release, known = self.one("lmcache"), fingerprints()["lmcache"]["releases"]
        if release is None or Version(release) >= Version(known[0]):
            return ""
        return (
            f"LMCache {release} is older than every release that kvfix knows ({known[0]} and newer): the fixes and "
            "releases in the findings may be wrong"
        )

    def within(self, dist: str, specifier: str, file: str | None = None, ran: str | None = None) -> bool | None:
        """Return whether the specifier contains `ran` (default: all releases of `_possible`), or None if unknown."""
        inside = {_within(each, specifier) for each in ([ran] if ran else self._possible(dist, file))}
        return inside.pop() if len(inside) == 1 else None


@lru_cache(maxsize=256)
def _public(text: str) -> str | None:
    return Version(text).public if _VERSION.fullmatch(text) else None


@lru_cache(maxsize=4096)
def _within(release: str, specifier: str) -> bool:
    return release in SpecifierSet(specifier, prereleases=True)


@lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """Return all vLLM releases whose logging statements kvfix knows."""
    return frozenset(release for row in statements.known()["vllm"] for release in row.lines)


@lru_cache(maxsize=1024)
def _of_statement(place: str) -> frozenset[str]:
    """Return the releases that log EngineCore's death at this place, such as `core.py:1332`, or an empty set."""
    path, _, line = place.rpartition(":")
    if path.rpartition("/")[2] != "core.py":
        return frozenset()
    places = (each for row in statements.known()["vllm"] if row.message == "fatal" for each in row.lines.items())
    # The smallest line number in `lines` is in EngineCoreProc. A failed start is logged _BEFORE lines above this line.
    return frozenset(release for release, lines in places if int(line) in (*lines, min(lines) - _BEFORE))


@lru_cache(maxsize=4096)
def _of_file(path: str) -> frozenset[str]:
    """Return the vLLM releases that have this source file, or an empty set if kvfix does not know the file."""
    files = TABLES.files
    for place in sorted(files, key=len, reverse=True) if "/kv_" in path or "kv_offload/" in path else ():
        if place in path:
            allowed = SpecifierSet(files[place])
            return frozenset(release for release in known() if release in allowed)
    return frozenset()


_NAMED = re.compile(rb"kv_connector['\"]?\s*[=:]\s*['\"]?(\w+)|connector with name: (\w+)")
_ROLE = re.compile(rb"kv_role['\"]?\s*[=:]\s*['\"]?(kv_\w+)")


class WhoRan:
    def __init__(self) -> None:
        #: Names of the connector classes in the log, e.g. "LMCacheConnectorV1".
        self.connectors: set[str] = set()
        self.roles: set[str] = set()
        #: True if an engine, or code of vLLM or LMCache, wrote a line of the log.
        self.engine = False
        #: vLLM's line `non-default args: ...`, cut to 4 kB, or "" if the log does not have this line.
        self.settings = ""

    @property
    def lmcache(self) -> bool:
        """True if a connector that the log names may use LMCache, or if the log names no connector."""
        return not self.connectors or any(name.startswith(("LMCache", "Multi")) for name in self.connectors)

    def take(self, line: LogLine) -> None:
        body = line.body
        self.engine = self.engine or _is_of_engine(line)
        if body.find(b"onnector") >= 0:
            self.connectors |= _named(body)
            self.roles |= {role.decode() for role in _ROLE.findall(body)}
        if line.name == "settings":
            self.settings = self.settings or body[:4096].decode("utf-8", "replace")
            if b"'kv_offloading_size'" in body:
                lmcache = b"'kv_offloading_backend': 'lmcache'" in body
                self.connectors.add("LMCacheConnectorV1" if lmcache else "OffloadingConnector")
        if line.name == "raised":
            self.connectors |= _marked(" ".join(frame[0] for frame in line.fields["frames"]).encode())
        elif not self.connectors:
            self.connectors |= _marked(body)
        if line.name == "logged":  # the place is like `nixl_connector.py:815`
            self.connectors |= _marked(line.fields["place"].encode())


def _is_of_engine(line: LogLine) -> bool:
    if line.process or line.time is not None or line.fields.get("logger"):
        return True
    if line.name == "raised":
        return any(f"/{of}/" in f"/{frame[0]}" for frame in line.fields["frames"] for of in ("vllm", "lmcache"))
    return line.name not in ("logged", "died", "stack", "who")


@lru_cache(maxsize=256)
def _named(text: bytes) -> frozenset[str]:
    """Return the names of connectors in a text, with LMCacheConnectorV1Dynamic as LMCacheConnectorV1."""
    names = (str(either[0] or either[1], "ascii", "replace") for either in _NAMED.findall(text))
    return frozenset("LMCacheConnectorV1" if name.startswith("LMCacheConnectorV1") else name for name in names)


@lru_cache(maxsize=256)
def _marked(text: bytes) -> frozenset[str]:
    return frozenset(name for name, marks in TABLES.connectors.items() if any(mark.encode() in text for mark in marks))
