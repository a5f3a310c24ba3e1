"""Texts in which no line of a log tells: a symptom in words, settings as they are typed. Asked last, never certain.

KVD199 asks them where no record's words are in the text (findings/unknown.py); they are no findings of a log.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from kvfix_tools.diagnose import findings, pasted, problems
from kvfix_tools.diagnose.findings import Answer, Severity, finding
from kvfix_tools.diagnose.findings import symptom_words as words
from kvfix_tools.diagnose.findings.memory import PASTE, works
from kvfix_tools.diagnose.findings.praise import praises

if TYPE_CHECKING:
    from kvfix_tools.diagnose.diagnosis import Diagnosis
    from kvfix_tools.diagnose.log_line import LogLine

#: In the order in which they are asked.
SYMPTOMS = ("KVD1200", "KVD1212", "KVD1202", "KVD1204", "KVD1206", "KVD1208", "KVD1210")


def beside_few_lines(log: Diagnosis) -> Answer | None:
    """What the words beside a few lines of a log say, where no finding knows these lines."""
    if log.findings or log.failures.dead or log.counts.total() > PASTE:
        return None
    later = (rule for rule in findings.rules().get("", ()) if rule.code > "KVD199")
    if any(rule.look(log, None) for rule in later):
        return None
    return symptom(log) or (None if works(log) else general_words(pasted.headless(log)))


def general_words(known: pasted.Known | None) -> Answer | None:
    """The kind of failure that a line names."""
    if known is None:
        return None
    return Answer(f"the text has its words: {known.words}", request="", verdict="unknown", record=known.record)


@lru_cache(maxsize=8)
def _text(pasted: tuple[bytes, ...]) -> str:
    return b"\n".join(pasted).decode("utf-8", "replace")


def typed(text: str) -> dict[str, str]:
    """{setting of LMCache: its value}, of a few, as the text has them; the last one counts."""
    return {found[1].lower(): found[2] for found in words.TYPED.finditer(text)}


def symptom(log: Diagnosis) -> Answer | None:
    """What a text without a line of a log complains of; None: nothing that is known, or no KV connector's matter."""
    text = _text(tuple(log.pasted))
    if not words.OF_KV.search(text) or words.WITHOUT.search(text):
        return None
    text = text.lower()
    valkey = problems.find("KVD1214")
    if "valkey" in text and words.CRASHES.search(text) and valkey is not None and valkey.concerns(log):
        return Answer("the text speaks of crashes with Valkey", request="", verdict="unknown", record=valkey)
    if "error handling request" in text[: words.HEAD]:
        return Answer("the text says `Error handling request`", "", "unknown", record=findings.find("KVD212"))
    unloaded = words.UNLOADED.search(text[: words.HEAD])
    if unloaded is not None:
        return Answer(f"the text says `{unloaded[0]}`", "", "unknown", record=findings.find("KVD1090"))
    for code in SYMPTOMS:
        rule = findings.find(code)
        answer = rule.look(log, None) if rule is not None else None
        if answer is not None:
            return answer._replace(request="", verdict="unknown", record=answer.record or rule)
    return None


def _said(log: Diagnosis, pattern: re.Pattern[str], what: str, head: int = words.HEAD) -> Answer | None:
    found = pattern.search(_text(tuple(log.pasted))[:head])
    return None if found is None else Answer(f"the text says `{found[0]}`{what}")


def too_large_in_words(log: Diagnosis) -> Answer | None:
    """A start that fails, as the text says, from some size of the CPU buffer on."""
    text = _text(tuple(log.pasted))
    large = words.TOO_LARGE.search(text[: words.HEAD])
    if large is None or int(large[1]) < words.LARGE or not words.STARTS.search(text):
        return None
    # vLLM's own option for weights is a number, not a size.
    if not words.OF_KV.search(text) and not re.search(r"(?i)offload\w* size", text):
        return None
    return Answer(f"the text says `{large[0]}`", record=findings.find("KVD1200"))


@finding("KVD1200", "buffer-times-ranks", Severity.CRASH, on=[])
def buffer_times_ranks(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """The engine dies while it starts with a large `max_local_cpu_size`, and no line of the text tells why.

    Cause: each rank takes `max_local_cpu_size` GB for itself and pins them, so that it times the ranks of a machine has
    to fit into its memory beside all else, and into the container's limit. A process that is killed for it leaves no
    error of its own: what remains is `leaked shared_memory objects`, or exit code 137.

    Setting: `max_local_cpu_size` (LMCACHE_MAX_LOCAL_CPU_SIZE) so that it times the ranks is at most 70 % of the memory;
    `dmesg -T | grep -i 'killed process'` or `kubectl describe pod` (OOMKilled) tells whether it was that; `ulimit -l
    unlimited` and a larger --shm-size for a container; VLLM_ENGINE_READY_TIMEOUT_S=1800 if nothing was killed.

    Good: the same, in every unit file and container.
    """
    text = _text(tuple(log.pasted))
    settings = typed(text)
    # The second one is how the chart of vLLM's production stack has it.
    given = settings.get("max_local_cpu_size") or settings.get("cpuoffloadingbuffersize", "")
    size = re.match(r"\d+(?:\.\d+)?", given)
    ranks = max((int(found) for found in words.RANKS.findall(text)), default=1)
    if size is None or float(size[0]) < words.LARGE:
        return None
    buffers = f"{ranks} ranks times {size[0]} GB are {ranks * float(size[0]):g}" if ranks > 1 else f"it is {size[0]}"
    return _said(log, words.DIES, f", and {buffers} GB")


@finding("KVD1212", "disk-fills-in-words", Severity.SLOW, on=[])
def disk_fills_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """A disk fills with chunks that are not deleted, and no line of the text tells why.

    Cause: which store it is decides. `gds_path` and a remote_url of fs:// never delete. `local_disk` deletes beyond
    `max_local_disk_size` for each rank, of what it has written itself: after a restart older files neither count nor
    hit. The server's adapters (`fs`, `fs_native`) delete with an `eviction` block and `max_capacity_gb` only, and
    `fs_native` does not count what lies there at its start.

    Setting: `--l2-adapter '{..., "max_capacity_gb": 500, "eviction": {"eviction_policy": "LRU"}}'`; in process
    `local_disk` with `max_local_disk_size` below the disk's size divided by the ranks, in place of `gds_path` or fs://;
    an empty folder before each start; where nothing deletes, a job: `find DIR -type f -amin +600 -delete`.

    Good: the same; no release has an eviction for gds_path or fs:// (0.5.6).
    """
    text = _text(tuple(log.pasted))
    answer = _said(log, words.DISK, "")
    if answer is not None and "max_capacity_gb" in text and '"eviction' not in text and "watermark" not in text:
        return answer._replace(record=problems.find("KVD190"))
    return answer


@finding("KVD1202", "wrong-text-in-words", Severity.WRONG, on=[])
def wrong_text_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Answers are wrong with a KV connector, and no line of the text tells why.

    Cause: in this order. LMCacheConnectorV1 with vLLM 0.26 or newer takes packed KV apart wrongly (KVD1238). KV is
    stored with losses or put together again: `remote_serde: cachegen`, `enable_blending`, an fp8 cache, another
    `--kv-cache-dtype` or release on one side. A load failed and its blocks were used (`The number of retrieved tokens
    is less`). KV of a hybrid model, or of layers with windows, came under a valid key. Keys of two models, LoRAs or
    images are the same.

    Setting: LMCacheConnectorV1 with vLLM 0.26 or newer: kvfix run -- CMD (KVF020). Else the same prompt twice at
    temperature 0, once with and once without --kv-transfer-config; then with `remote_serde: naive`, without blending
    and with an empty store. `kvfix run --mode check -- CMD` names the first rule that is broken, and
    `kvfix doctor -- CMD` what does not go together.

    Good: what that shows.
    """
    text = _text(tuple(log.pasted))
    settings = typed(text)
    lossy = [f"{name}: {value}" for name, value in settings.items() if value.lower() in ("cachegen", "kivi")]
    lossy += ["enable_blending"] if settings.get("enable_blending", "").lower() == "true" else []
    answer = _said(log, words.WRONG, f", and it sets {' and '.join(lossy)}, which changes KV" if lossy else "")
    packed = problems.find("KVD1238")
    in_process = "lmcache" in text.lower() and not words.APART.search(text)
    if answer is None or lossy or packed is None or not in_process:
        return answer
    return answer._replace(record=packed) if log.releases.within("vllm", ">=0.26") is True else answer


@finding("KVD1204", "hang-in-words", Severity.HANG, on=[])
def hang_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Something hangs with a KV connector, and no line of the text tells why.

    Cause: only the stacks tell: a load that does not end (its store, server or peer does not answer), a lookup without
    an answer, a CPU cache that is full of pinned chunks (`No eviction candidates`), a collective that one rank does not
    join, or a request for which there will never be blocks.

    Setting: while it hangs `kvfix dump PID`, or `py-spy dump --pid PID` of EngineCore and of each worker, and
    `kvfix-diagnose` on that; the log's last lines of the same time; and whether it hangs without --kv-transfer-config.

    Good: what the stacks show.
    """
    return _said(log, words.HANGS, "")


@finding("KVD1206", "no-hits-in-words", Severity.SLOW, on=[])
def no_hits_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Nothing hits, and no line of the text tells why.

    Cause: in this order. Two processes make different keys: PYTHONHASHSEED is not the same for all that share a store,
    a disk, a peer or a server (without it each start hashes otherwise). Prompts are shorter than `chunk_size` (256), or
    differ in their first chunk: a date, an id. vLLM's own prefix cache has the prompt: then `need to load` is 0.
    Nothing is stored: `local_cpu: false` without another store, a `kv_role` that only loads, a full cache; a store with
    `remote_serde: cachegen` loses chunks in several releases (KVD435). The chunks were evicted before they came again:
    a small `max_local_cpu_size`.

    Setting: PYTHONHASHSEED=0 before the start of every engine, worker and server; `remote_serde: naive`; one prompt of
    2000 tokens twice, with `--no-enable-prefix-caching` or a restart between; the lines `Stored ... tokens` of the
    first and `LMCache hit tokens` of the second say which of these it is.

    Good: the same, in every unit file and container.
    """
    text = _text(tuple(log.pasted))
    if words.SERVED.search(text) or "LMCacheMPConnector" in log.who.connectors:
        return None  # the server hashes for all
    settings = typed(text)
    shared = settings.get("remote_url") or (settings.get("enable_p2p", "").lower() == "true" and "enable_p2p")
    seeded = "PYTHONHASHSEED" in text
    if seeded and not shared and words.SLOW.search(text[: words.HEAD]):
        return None  # the keys are right: KVD1210
    seed = f", and it has {shared} and no PYTHONHASHSEED" if shared and not seeded else ""
    lossy = ", and remote_serde is cachegen: naive first" if settings.get("remote_serde") == "cachegen" else ""
    return _said(log, words.MISSES, seed + lossy)


@finding("KVD1208", "memory-grows-in-words", Severity.LEAK, on=[])
def memory_grows_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """Host memory grows with a KV connector, and no line of the text tells why.

    Cause: in this order. The CPU cache fills: up to `max_local_cpu_size` GB for each rank, in 0.3.10 and newer bit by
    bit, which is no leak and ends there. Chunks wait to be written to a slow store or disk. The page cache of a disk
    store counts in the container. Pins that are never let go (`Pin timeout detected`, `No eviction candidates`).

    Setting: compare where it ends with `max_local_cpu_size` times ranks; a limit of the container of that and 30 %
    more; RssAnon and RssFile in /proc/PID/status tell whether it is the process or its files.

    Good: memory for the sum, or a smaller `max_local_cpu_size`; if it grows beyond the sum, a report with both numbers.
    """
    return _said(log, words.GROWS, "")


@finding("KVD1210", "no-gain-in-words", Severity.SLOW, on=[])
def no_gain_in_words(log: Diagnosis, line: LogLine | None) -> Answer | None:
    """With a KV connector it is not faster, and no line of the text tells why.

    Cause: in this order. vLLM's own prefix cache serves the second prompt in both runs, so that there is nothing to
    load (`need to load` is 0 or below). The cache is smaller than what comes between two uses of a prefix:
    `max_local_cpu_size` (5 GB for each rank if it is not set) below the GPU's KV cache holds nothing that the GPU does
    not hold, and prompts that come in turns are evicted just before they are needed. The prompts differ in their first
    `chunk_size` tokens (256), or are shorter. Loading costs more than computing: a small model, cachegen, a disk, a
    network.

    Setting: `max_local_cpu_size` larger than the GPU's KV cache and than the working set: its tokens times 2 x layers x
    KV heads of a rank x head size x bytes (Llama 70B, two ranks: 0.16 MB a token). To measure: more tokens between the
    two uses than `GPU KV cache size` says, or `--no-enable-prefix-caching` in both runs. The second round's lines
    `LMCache hit tokens` and `need to load` say which of these it is.

    Good: a cache that is larger than the GPU's, for prompts of thousands of tokens that begin alike.
    """
    text = _text(tuple(log.pasted))
    size = typed(text).get("max_local_cpu_size")
    if not words.KEEPS.search(text) or praises(text[: pasted.SHORT]):
        return None
    return _said(log, words.SLOW, f", and max_local_cpu_size is {size}" if size else "", pasted.SHORT)
