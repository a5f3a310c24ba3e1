"""Count lookups and stores, collect LMCache's settings, and find why lookups have no hit."""

import re
from functools import lru_cache

from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Answer, Answers, decides, finding, note
from kvfix_tools.diagnose.log_line import Fields, LogLine

#: A finding needs lookups of ENOUGH requests. kvfix remembers at most _REQUESTS requests and _ENGINES engines.
ENOUGH, _REQUESTS, _ENGINES = 10, 20_000, 64
#: The defaults of `chunk_size` (tokens) and of `max_local_cpu_size` (GB) in every LMCache release.
CHUNK, _CPU_SIZE = 256, 5.0
#: LMCache 0.3.9 to 0.5.6 logs `kv_shape=(layers, 2, tokens of a chunk, heads, head size)`.
_SHAPE = re.compile(r"kv_shape=\(\d+, \d+, (\d+)")
_ENGINE = re.compile(r"model_name='([^']*)'.*?world_size=(\d+).*?kv_dtype=([\w.]+)")
_SETTING = re.compile(r"'?(\w+)'?(?:: |=)('[^']*'|[^\s,{}()]+)")
_NOWHERE = re.compile(r"\(?'', '', 0, ''\)?")
#: Find the size in a line like `Stored ... size: 1.5300 gb` of LMCache 0.3.9 to 0.5.6.
_SIZE = re.compile(rb"size: (\d{1,6}(?:\.\d{1,6})?) [gG][bB]")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Lookups:
    """Counts of a log's lookups and stores, and LMCache's settings. Lookups of the same request count as one lookup."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self.longest = 0
        #: Number of tokens of the longest hit in vLLM's own prefix cache.
        self.local = 0
        self.hit = False
        self.loads = self.below = self.most = self.least = 0
        self.stored = 0
        self.askers: set[str] = set()
        self.storers: set[str] = set()
        #: For each process, the gigabytes that the process has stored.
        self.gigabytes: dict[str, float] = {}
        self.chunk = 0
        self.settings: dict[str, str] = {}
        #: For each (model, world size, dtype, chunk size) of a worker, the line that has these values.
        self.engines: dict[tuple[str, str, str, str], LogLine] = {}
        self.shared = self.empty = 0
        #: Number of lines that report a process without PYTHONHASHSEED.
        self.unseeded = 0

    @property
    def number(self) -> int:
        return len(self.requests)

    @property
    def has_no_hit(self) -> bool:
        """True if the log has enough lookups for a finding, and no lookup has a hit."""
        return self.number >= ENOUGH and not self.hit

    @property
    def cpu_size(self) -> str:
        """The value of `max_local_cpu_size` in GB, or "" if the log does not show this setting."""
        found = _NUMBER.match(self.settings.get("max_local_cpu_size", ""))
        return found[0] if found is not None else ""

    def take(self, line: LogLine) -> None:
        f = line.fields
        if line.name == "asked":
            if f.get("hit") is not None:  # an asynchronous lookup has no `hit` until its answer arrives
                self._take_lookup(f, line.request, line.process)
        elif line.name == "stored":
            if f["tokens"]:
                self.stored += 1
                if len(self.storers) < _ENGINES:
                    self.storers.add(line.process)
            size = _SIZE.search(line.body)
            if size is not None and (line.process in self.gigabytes or len(self.gigabytes) < _ENGINES):
                self.gigabytes[line.process] = self.gigabytes.get(line.process, 0.0) + float(size[1])
        elif line.name == "hash_seed":
            self.unseeded += 1
            self.shared += not f["why"].startswith("Using builtin")
        else:
            self.settings.update(_settings(f["settings"]))
            if self.settings.get("chunk_size", "").isdigit():
                self.chunk = int(self.settings["chunk_size"])
            self.shared += self.settings.get("remote_url", "None") != "None"

    def _take_lookup(self, f: Fields, request: str, process: str) -> None:
        self.longest = max(self.longest, f["total"])
        self.local = max(self.local, f.get("computed") or 0)
        self.hit = self.hit or f["hit"] > 0
        if request in self.requests or len(self.requests) >= _REQUESTS:
            return
        self.requests.add(request)
        self.askers.add(process)
        if f.get("least") is not None and f["hit"] > 0:
            self.below += 1
            self.least, self.most = f["least"], max(self.most, f["hit"])
        self.loads += f.get("least") is None and (f.get("need") or 0) > 0


class LookupsByFile(dict[str, Lookups]):
    """{log file: its lookups}. kvfix assumes that each file is the log of a different engine."""

    def __missing__(self, file: str) -> Lookups:
        return self.setdefault(file, Lookups())


def lookups_of(log: Diagnosis) -> Lookups:
    """Return the counts and settings of all files, merged."""
    return log.state(Lookups)


@note("asked", "stored", "hash_seed", "configured", "engine_configured")
def _note_lookups(log: Diagnosis, line: LogLine) -> None:
    for kept in (lookups_of(log), log.state(LookupsByFile)[line.file]):
        kept.take(line)


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


@finding
def never_a_hit(log: Diagnosis, line: LogLine) -> Answer | None:
    kept, files = lookups_of(log), log.state(LookupsByFile)
    if kept.has_no_hit:
        return _hashed_differently(kept)
    for file, each in files.items() if len(files) > 1 else ():
        answer = _hashed_differently(each) if each.has_no_hit else None
        if answer is not None:
            return answer._replace(sentence=f"{answer.sentence}, in {file}")
    return None


def _hashed_differently(kept: Lookups) -> Answer | None:
    if not kept.stored or not kept.unseeded:
        return None
    apart = bool(kept.storers - kept.askers) or len(kept.askers) > 1
    lost = kept.local >= (kept.chunk or CHUNK)
    if not (apart or lost or kept.shared or kept.number >= 100):
        return None
    why = f"; vLLM's own prefix cache had up to {kept.local} tokens of these prompts" if lost else ""
    sentence = f"{kept.number} lookups, {kept.stored} stores, 0 hits, and PYTHONHASHSEED is not set{why}"
    return Answer(sentence, sure=apart or lost)


@decides("prompts-below-a-chunk", "nothing-stored", "shared-prefix-below-a-chunk")
def stores_without_hits(log: Diagnosis, line: LogLine | None) -> Answers:
    kept = lookups_of(log)
    chunk = kept.chunk or CHUNK
    if not kept.has_no_hit:
        return
    unstored = f"{kept.number} lookups of up to {kept.longest} tokens, no stores, 0 hits"
    if not kept.stored and kept.longest < chunk:
        default = "" if kept.chunk else ", if chunk_size is the default"
        sentence = f"{unstored}; a chunk has {chunk} tokens{default}"
        yield "prompts-below-a-chunk", Answer(sentence, sure=bool(kept.chunk))
    elif not kept.stored:
        is_consumer = log.who.roles == {"kv_consumer"}
        why = "; kv_role is kv_consumer, which does not store" if is_consumer else ""
        yield "nothing-stored", Answer(f"{unstored}{why}", sure=is_consumer)
    elif 0 < kept.local < kept.chunk:
        shared = f"vLLM's own prefix cache had at most {kept.local} tokens of a prompt; a chunk has {chunk} tokens"
        sentence = f"{kept.number} lookups, {kept.stored} stores, 0 hits; {shared}"
        yield "shared-prefix-below-a-chunk", Answer(sentence)


@decides("peers-without-async-loading", "peers-have-nothing", "engines-with-different-keys")
def other_engines_without_hits(log: Diagnosis, line: LogLine | None) -> Answers:
    kept = lookups_of(log)
    if not kept.has_no_hit:
        return
    without = f"{kept.number} lookups, 0 hits"
    if kept.settings.get("enable_p2p") == "True" and kept.settings.get("enable_async_loading") == "False":
        sentence = f"{without}; enable_p2p is True, enable_async_loading is False"
        yield "peers-without-async-loading", Answer(sentence)
    if kept.empty >= ENOUGH and log.counts["peer_asked"] <= kept.empty:
        alone = kept.settings.get("local_cpu") == "False"
        why = "; local_cpu is False, so engines announce no chunks" if alone else ""
        sentence = f"{without}; engines asked the controller {kept.empty} times, and the controller named no peer{why}"
        yield "peers-have-nothing", Answer(sentence, sure=alone)
    if kept.shared and len(kept.engines) > 1:
        names = ("model", "ranks", "dtype", "chunk size")
        differ = "; ".join(
            f"{name} {' and '.join(sorted(set(values)))}"
            for name, values in zip(names, zip(*kept.engines, strict=True), strict=True)
            if len(set(values)) > 1
        )
        sentence = f"{without} in a shared store; the engines differ: {differ[:300]}"
        yield "engines-with-different-keys", Answer(sentence, evidence=tuple(kept.engines.values())[:4])


@finding
def below_the_minimum(log: Diagnosis, line: LogLine) -> Answer | None:
    kept = lookups_of(log)
    if kept.below < ENOUGH or kept.loads or log.counts["retrieved"]:
        return None
    hits = f"{kept.below} lookups hit up to {kept.most} tokens, but loaded none"
    return Answer(f"{hits}: min_retrieve_tokens is {kept.least}")


@finding
def stored_more_than_fits(log: Diagnosis, line: LogLine | None) -> Answer | None:
    kept = lookups_of(log)
    most, room = max(kept.gigabytes.values(), default=0.0), float(kept.cpu_size or _CPU_SIZE)
    is_shared = kept.settings.get("remote_url", "None") != "None"
    if not kept.has_no_hit or is_shared or most <= room or log.findings:
        return None
    of = "max_local_cpu_size is" if kept.cpu_size else "the default of max_local_cpu_size is"
    sentence = f"{kept.number} lookups, 0 hits; a worker has stored {most:.3g} GB, and {of} {room:g} GB"
    return Answer(sentence, sure=False)
