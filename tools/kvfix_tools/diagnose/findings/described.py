"""What people describe without the line of a log that would show it: never certain, and only where nothing else is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import pasted, problems
from kvfix_tools.diagnose.failures import is_cut
from kvfix_tools.diagnose.findings import Answer, Severity, find, finding
from kvfix_tools.diagnose.findings.lookups_seen import lookups_of
from kvfix_tools.diagnose.findings.memory import PASTE

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: No lookup finds anything, or the hashes of processes differ.
_NO_HITS = re.compile(
    r"(?i)\bhit[ _-]?(?:rate|ratio|tokens?)\b[^.\n]{0,40}?(?<![.\d])(?:0(?:\.0+)?(?!\.?\d)|zero\b)"
    r"|\b(?:0|zero|no|never|not|without|any) (?:\w+ ){0,3}(?:hits?|hitting|reused?|match(?:es)?)\b"
    r"|n't (?:\w+ ){0,2}(?:hit|reuse)\b|\bcache miss(?:es)?\b|\bNONE_HASH\b"
    r"|\bhash(?:es|ing)? (?:algorithm|mismatch|differ)"
)
#: Models with layers that keep a state (Mamba, GDN, linear attention) beside those with attention.
_HYBRID = re.compile(
    r"(?i)\bqwen3\.[5-9]|qwen3-(?:coder-)?next|nemotron-?(?:3|h)\b|falcon-h1|\bjamba|\bbamba|\bzamba|granite-4|"
    r"kimi-linear|minimax-(?:text-01|m1)\b|\blfm2|\bplamo-?2|\bmamba"
)
#: Models of which the same warning comes and which run without the manager.
_WINDOWS = re.compile(r"(?i)gpt-oss|gemma|llama-4|ministral|\bphi-?\d")
_IN_PROCESS = re.compile(
    r"LMCacheConnectorV1|kv[-_]offloading[-_]backend\W{0,3}lmcache|(?i:vllm\b.*\blmcache|lmcache\b.*\bvllm)"
)
_FAILS = re.compile(r"(?i)fail|crash|error|exception|n't (?:start|work)|not (?:start|work|support)|cannot")
#: A server that is started, LMCache's variables, and any connector.
_SERVES = re.compile(r"\bvllm serve\b|openai\.api_server\b|non-default args")
_VARIABLE = re.compile(r"\bLMCACHE_(?!USE_EXPERIMENTAL|LOG|TRACK|IMAGE|VERSION|TAG|DIR|HOME)[A-Z_]+\b")
#: A line of which no more is left than its level and a part of its date, or that only heads a traceback.
_HEAD = re.compile(rb"\s*ERROR[\s\d:-]*|WorkerProc hit an exception\.")
#: A disk of LMCache's in its own process, a restart, and what is then done again.
_DISK = re.compile(r"LocalDiskBackend|local_disk['\"]?\s*[:=]\s*(?!null|None|false|~)\S|LMCACHE_LOCAL_DISK\W")
_RESTARTS = re.compile(r"(?i)\brestart|\bshut(?:ting)? ?down and|start(?:ing|ed)? (?:it )?(?:up )?again|\breboot")
_AGAIN = re.compile(
    r"(?i)re-?creat|\blost\b|from (?:scratch|zero)|\b(?:not|never)(?: \w+)? (?:load|re-?load|reus|restor|persist)"
    r"|\b(?:are|is) gone\b|re-?comput"
)
#: One seed for all; the tokens and the hash that one line logs; hashes that are said to differ.
_SEEDED = re.compile(r"PYTHONHASHSEED[\"'` ]{0,3}[:=][\"'` ]{0,3}\d|PYTHONHASHSEED`? (?:is|was) (?:already )?set")
_HASHED = re.compile(r"(tokens?_\w+=[^\n]{8,400}?)\b\w*hash=(-?\w{6,})")
_HASHES_DIFFER = re.compile(
    r"(?i)\bhash(?:es|ing)?(?: values?| keys?| results?)?[^.\n]{0,40}?"
    r"(?:mis-?match|\bdiffer|inconsisten|not (?:constant|consistent|equal|the same|determin))"
    r"|(?:different|inconsistent|mismatch\w*|non-?determin\w*|indetermin\w*) (?:\w+ )?hash"
)
#: A setting in a file, as YAML has it; those that name a place, and how they are switched off.
_IN_FILE = re.compile(r"(?m)^[ \t]{0,4}(chunk_size|local_cpu|local_disk|remote_url): *[\"']?([^\s#\"']+)")
_PLACES, _OFF = ("local_disk", "remote_url"), ("none", "null", "false", "~")
#: Whose line it is that a sentence quotes between backticks, or that begins a line without its head.
_QUOTED_LINES = {
    "No eviction candidates found in local cpu backend": "KVD402",
    "Local cpu memory under pressure": "KVD404",
    "Recovered from KV load failure: ": "KVD303",
    " due to KV load failure (failure_policy=fail": "KVD303",
}
_BARE = tuple(begin.encode() for begin in _QUOTED_LINES)
_TITLE = re.compile(rb"(?m)^# .{0,200}?\"([^\"\n]{12,300})\"")
#: One side of LMCache's P/D, and that the engine's processes are not there yet: so many lines, ten seconds apart.
_SIDE = re.compile(r"(?:nixl|pd)_role['\"]?\s*[:=]\s*['\"]?(sender|receiver)")
_NOT_YET, _LONG = re.compile(r"Waiting for [1-9]\d* local, \d+ remote core engine proc\(s\) to start"), 4
_CONNECTOR = re.compile(
    r"(?i)kv[-_]transfer[-_]config['\"]?[ =:,\\]+\W*(?:\{|KV|\$)|kv_connector|kv[-_]offloading|lmcache\w*connector"
    r"|lmcache[ _]server|sglang"
)


def _text(log: Diagnosis, whole: bool = False, instead: Collection[str] = ()) -> str:
    """What was pasted, if nothing is known of it but what these findings say."""
    if (log.findings and not instead) or log.hit or log.counts.total() > PASTE:
        return ""
    return b"\n".join(log.whole if whole else log.pasted).decode("utf-8", "replace")


def _is_open(log: Diagnosis) -> bool:
    """Whether no failure is shown, or one of which what it says was cut off."""
    first = log.failures.first
    return first is None or is_head(first) or is_cut(first)


def is_head(line: LogLine) -> bool:
    """Whether a line says no more than that something failed: the traceback below it is not there."""
    return line.name == "logged" and _HEAD.fullmatch(line.body) is not None


def described(log: Diagnosis, instead: Collection[str] = ()) -> Answer | None:
    """The record that a text describes without a line of it: of several the one that replaces, or has most patterns.

    instead: codes of what was found; then the record has to replace one of them."""
    text, best = _text(log, instead=instead), None
    cut = log.failures.first is not None  # then it is no wrong answer
    for record in problems.catalogue() if text and (instead or _is_open(log)) else ():
        may_be = set(instead) & set(record.replaces) if instead else not cut or record.severity is Severity.CRASH
        if not may_be:
            continue
        more = best is None or len(record.said) > len(best.said) or best.code in record.replaces
        if record.said and more and record.concerns(log) and all(re.search(each, text) for each in record.said):
            best = record
    if best is None:
        return None
    words = [" ".join(found[0].split())[-60:] for each in best.said if (found := re.search(each, text))]
    return Answer(f"the text speaks of {', '.join(words)}", request="", verdict="unknown", record=best)


def quoted(log: Diagnosis) -> Answer | None:
    """The finding of a line that a sentence quotes or that lost its head, where no other line tells more."""
    if log.failures.first is not None:
        return None
    quotes = [each for text in log.whole for within in (pasted.QUOTED, _TITLE) for each in within.findall(text)]
    bare = [line for text in log.whole for line in text.splitlines() if line.startswith(_BARE)]
    for line in (each.decode("utf-8", "replace") for each in (*quotes, *bare)):
        code = next((code for begin, code in _QUOTED_LINES.items() if begin in line), None)
        if code is not None:
            return Answer(f"the text quotes `{line[:120]}`", request="", verdict="unknown", record=find(code))
    return None


def cut_off(log: Diagnosis) -> Answer | None:
    """What a failure is whose exception is cut off or not there: an import, or a hybrid model that cannot start."""
    first = log.failures.first
    frames = first.fields.get("frames", ()) if first is not None and _is_open(log) else ()
    said = described(log) if first is not None else None
    if said is not None:
        return said
    if frames and frames[-1][2] == "<module>" and "/lmcache" in frames[-1][0].lower():
        file = "/".join(frames[-1][0].split("/")[-2:])
        record = problems.find("KVD1326")
        return Answer(f"an import of LMCache's ends in {file}", "", "unknown", record=record)
    return _hybrid_model(log)


def _hybrid_model(log: Diagnosis) -> Answer | None:
    text, record = _text(log, whole=True), problems.find("KVD650")
    if not _is_open(log) or record is None or not record.concerns(log):
        return None
    warned = "Hybrid KV cache manager is disabled for this hybrid model" in text and not _WINDOWS.search(text)
    model = _HYBRID.search(text)
    if warned and (model is not None or log.failures.dead or log.failures.first is not None):
        return Answer(
            "vLLM has switched its hybrid KV cache manager off for this hybrid model",
            request="",
            verdict="unknown",
            record=record,
        )
    if model is None or not _IN_PROCESS.search(text) or "LMCacheMPConnector" in text or not _FAILS.search(text):
        return None
    return Answer(f"{model[0]} with LMCache in vLLM's process", request="", verdict="unknown", record=record)


@finding("KVD1314", "settings-without-a-connector", Severity.SLOW, on=[""])
def settings_without_a_connector(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """LMCache is configured, and vLLM is started without a connector: nothing is stored or looked up.

    Cause: LMCACHE_... variables and a configuration file do nothing alone: vLLM makes LMCache's engine only where
    `--kv-transfer-config` (or `--kv-offloading-backend lmcache`) is among its options. A chart or a platform that sets
    the variables has left the option out.

    Setting: `--kv-transfer-config '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'` among vLLM's options (a
    chart's `extraArgs`, a platform's backend parameters), and restart; `Creating v1 connector` must come in the log.

    Good: a release of the chart or platform that adds the option; the vLLM command that it prints decides.

    Normal: variables that are left over in the environment.
    """
    text = _text(log, whole=True)
    variable = _VARIABLE.search(text)
    if variable is None or not _is_open(log) or log.failures.first is not None or log.who.connectors:
        return None
    if not _SERVES.search(text) or _CONNECTOR.search(text):
        return None
    return Answer(f"{variable[0]} is set, and no --kv-transfer-config is there", request="", verdict="unknown")


@finding("KVD1253", "waits-for-its-peer-at-the-start", Severity.HANG, on=[""])
def waits_for_its_peer_at_the_start(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """One side of LMCache's P/D does not get through its start, without an error.

    Cause: in LMCache before 0.3.7 (`enable_nixl`, `nixl_role`) each rank waits in its start for the same rank of the
    other side. With another --tensor-parallel-size there, or no engine at `nixl_receiver_host`, a rank waits for ever.
    In newer releases a large buffer that is pinned or registered takes minutes.

    Setting: the same --tensor-parallel-size on prefill and decode, decode started first, the same nixl_receiver_port on
    both; `py-spy dump --pid PID` of a worker shows whether it waits in a socket of LMCache's.

    Good: LMCache 0.3.9 or newer with `enable_pd` and `pd_role`, where no side waits for the other.

    Normal: a large model that is still being loaded.
    """
    text = _text(log, whole=True)
    side = _SIDE.search(text)
    if side is None or not _is_open(log) or log.failures.first is not None:
        return None
    times = len(_NOT_YET.findall(text))
    if times < _LONG:
        return None
    return Answer(f"the {side[1]} logs {times} times that its engine has not started", request="", verdict="unknown")


@finding("KVD1348", "disk-is-not-read-at-a-start", Severity.SLOW, on=[""])
def disk_is_not_read_at_a_start(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """After a restart nothing is found in `local_disk`: LMCache does not read what lies there.

    Cause: which chunks the disk holds is kept in memory alone (local_disk_backend.py), in every release up to 0.5.6. A
    new process begins with an empty list, finds nothing of the old files, and writes them anew.

    Setting: what is to outlive a restart into a store that is asked for its keys: `remote_url` of redis:// or fs://
    (files), with `export PYTHONHASHSEED=0`; or an `lmcache server` with LMCacheMPConnector, which goes on while vLLM
    restarts. Old files of `local_disk` can be deleted.

    Good: no release of LMCache up to 0.5.6 reads them.

    Normal: the first request with each prompt.
    """
    text = _text(log, whole=True)
    if not _is_open(log) or not (_DISK.search(text) and _RESTARTS.search(text)):
        return None
    if not log.counts["asked"] and not _NO_HITS.search(text) and not _AGAIN.search(text):
        return None
    return Answer("local_disk, a restart, and nothing is found after it", request="", verdict="unknown")


@finding("KVD1275", "keys-differ-with-one-seed", Severity.SLOW, on=[""])
def keys_differ_with_one_seed(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Two processes make different keys for the same tokens, although PYTHONHASHSEED is the same for both.

    Cause: up to 0.3.15 LMCache hashes None along with the tokens. With the algorithm `builtin` that is Python's own
    hash, and on Python 3.11 and older the hash of None is its address, which no seed fixes.

    Setting: `pre_caching_hash_algorithm: sha256_cbor` (LMCACHE_PRE_CACHING_HASH_ALGORITHM) in every process, with the
    PYTHONHASHSEED that is set, and an empty store; or LMCache 0.4.1.

    Good: LMCache 0.4.1 or newer, or Python 3.12.
    """
    text = _text(log, whole=True)
    if not _is_open(log) or not _SEEDED.search(text) or log.releases.within("lmcache", ">=0.4.1") is True:
        return None
    hashes: dict[str, set[str]] = {}
    for tokens, made in _HASHED.findall(text):
        hashes.setdefault(tokens, set()).add(made)
    apart = next((sorted(made) for made in hashes.values() if len(made) > 1), None)
    if apart is not None:
        return Answer(f"the same tokens hash to {apart[0]} and to {apart[1]}", request="", verdict="unknown")
    words = _HASHES_DIFFER.search(text)
    return None if words is None else Answer(f"the text says `{words[0]}`", request="", verdict="unknown")


@finding("KVD1330", "file-is-not-what-runs", Severity.RISK, on=[""])
def file_is_not_what_runs(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The settings that LMCache logs are not those of the file that was pasted with them.

    Cause: LMCache has not read this file. LMCACHE_CONFIG_FILE is not in the environment of vLLM's processes (set in a
    line of its own without `export`, in another shell, outside of the container), names another file, or an LMCACHE_...
    variable of the same name counts more.

    Setting: `export LMCACHE_CONFIG_FILE=/path/in/the/container/lmcache.yaml` before `vllm serve` (or in front of it in
    the same line), `env | grep LMCACHE_` for what counts more, and restart.

    Good: the line `LMCache Configuration:` with the file's values.
    """
    runs = lookups_of(log).settings
    if not runs or not _is_open(log) or log.failures.first is not None:
        return None
    said: dict[str, set[str]] = {}
    for name, value in _IN_FILE.findall(_text(log, whole=True)):
        said.setdefault(name, set()).add(value.lower())
    for name, values in said.items():
        own = runs.get(name, "").lower()
        # How a path is written may differ; whether there is one does not.
        is_off = own in _OFF and not values & set(_OFF)
        if len(values) == 1 and (is_off if name in _PLACES else own and own not in values):
            return Answer(f"{name} is {next(iter(values))} in the file, and {own} in what LMCache logs", "", "unknown")
    return None
