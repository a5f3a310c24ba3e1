"""Summarize a log in at most 8 kB, for a person or a language model. Write a bug report with the summary.

A user can post the summary and the report in public. Both texts have no prompt, secret, host name or local path.
"""

import re
from collections.abc import Iterator

import kvfix
from kvfix_tools import redact
from kvfix_tools.diagnose import advice
from kvfix_tools.diagnose.diagnosis import Diagnosis
from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.log_finding import LogFinding, by_kind
from kvfix_tools.diagnose.log_line import LogLine, without_tokens
from kvfix_tools.diagnose.report_text import named_versions, nothing_found, read_words

#: Maximum bytes of the summary, maximum characters of a line, and maximum number of entries of each kind.
LIMIT, _WIDTH = 8000, 300
_EXCEPTIONS, _FRAMES, _FINDINGS, _UNKNOWN, _PROCESSES = 4, 6, 6, 5, 6
#: Settings in vLLM's line `non-default args: ...` that decide what a connector does.
_SETTINGS = re.compile(
    r"'(?P<name>kv_transfer_config|max_model_len|block_size|max_num_seqs|max_num_batched_tokens|num_gpu_blocks_override"
    r"|gpu_memory_utilization|tensor_parallel_size|pipeline_parallel_size|data_parallel_size"
    r"|decode_context_parallel_size|enable_prefix_caching|async_scheduling|speculative_config|scheduling_policy"
    r"|kv_cache_dtype|disable_hybrid_kv_cache_manager)': (?P<value>KVTransferConfig\(.*?\)(?=, '|\})|\{[^{}]*\}"
    r"|'[^']*'|[^,}]+)"
)
_URL = re.compile(r"https://github\.com/[\w./-]*\w")
#: Path of a file in a package. The pattern's group begins at the package, after the folders of the host.
_PACKAGE = re.compile(r"(?:^|/)(?:(?:site|dist)-packages/|(?=(?:vllm|lmcache|nixl|mooncake)/))(\S+)$")
_PACKAGED = re.compile(
    r"(?<![\w./])/(?:[\w.@+-]+/)*(?:site-packages/)?((?:vllm|lmcache|nixl|mooncake)/(?:\w+/)*\w+\.py)"
)
_HOSTS = (
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"\b([a-z][a-z0-9+]{1,20}://)[^\s'\",/:}\])]+"), r"\1<host>"),
    (re.compile(r"(?i)\b((?:engine_id|hostname|host|server)['\"]?\s*[=:]\s*['\"]?)[^\s'\",}\])]+"), r"\1<left out>"),
    (_PACKAGED, r"\1"),
    # a path, whose folder names may contain blanks
    (re.compile(r"(?<![\w./])(?:~|\.{1,3})?/(?:[\w.@+= -]+/)*[\w.@+=-]+"), "<path>"),
    (
        re.compile(
            r"(?<![\w./])(?:[\w.@+-]+/)*[\w.@+-]{2,}\.(?:safetensors|jsonl?|ya?ml|toml|bin|pt|data|gguf|log|txt|gz)\b"
        ),
        "<file>",
    ),
)
#: Finds the beginning of a value in a message.
_VALUES = re.compile(r"\d|'|\"|<")
#: Finds the text of a user's request in an error message.
_PROMPT = re.compile(
    r"(?is)(\b(?:prompt|messages|content|input_text|text)\b['\"]?\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\])"
)


def brief(log: Diagnosis, findings: list[LogFinding]) -> str:
    """Return a summary with the most important lines first. If the summary exceeds LIMIT bytes, cut off its end."""
    text = "\n".join(line[:_WIDTH] for line in _lines(log, findings))
    cut = text.encode()
    if len(cut) <= LIMIT:
        return text + "\n"
    kept = cut[: LIMIT - 40].decode("utf-8", "ignore")
    return kept[: kept.rfind("\n") + 1] + "(cut here)\n"


def issue(log: Diagnosis, findings: list[LogFinding]) -> str:
    """Return a bug report in Markdown, with the summary of the log and links to known issues."""
    first = findings[0] if findings else None
    threads = dict.fromkeys(thread for found in findings for thread in _threads(log, found))
    parts = [f"# {_title(log, first)[:120]}", "", f"<!-- kvfix-diagnose {kvfix.__version__} -->", ""]
    parts += ["## What happened", ""]
    parts += [safe(f"- {event.what}") for found in findings[:2] for event in found.history[-8:]] or [
        f"{first.rule.title if first else 'See the log.'}"
    ]
    parts += ["", "## How to reproduce", "", "(the command, the model and the requests, without their texts)", ""]
    parts += ["## Summary of the log", "", "```text", brief(log, findings).rstrip(), "```", ""]
    if threads:
        parts += ["## Known reports", "", *(f"- {thread}" for thread in threads), ""]
    return "\n".join(parts)


def _title(log: Diagnosis, found: LogFinding | None) -> str:
    if found is None or found.is_note:
        return "No failure was found in the log"
    first = log.failures.first
    process = found.process or (first.process if first is not None else "")
    who = process.partition(" ")[0] or "vLLM"
    what = _VALUES.split(safe(found.evidence[0].text if found.evidence else found.sentence))[0].rstrip(" :,(=")
    if found.severity is Severity.CRASH:
        return ", ".join((f"{who} died: {what}", *named_versions(log)))
    return f"{found.rule.title.rstrip('.')}: {safe(found.sentence)}"


def _threads(log: Diagnosis, found: LogFinding) -> list[str]:
    upstream = [url for fix in advice.fixes(log, found) for url in _URL.findall(fix.section("Upstream"))]
    return [*found.rule.threads, *upstream]


def safe(text: str) -> str:
    """Remove secrets, prompts, token ids, host names and paths from a text."""
    text = redact.text(without_tokens(text))
    text = _PROMPT.sub(r"\1<left out>", text)
    for pattern, shown in _HOSTS:
        text = pattern.sub(shown, text)
    return " ".join(text.split())


def _lines(log: Diagnosis, findings: list[LogFinding]) -> Iterator[str]:
    yield f"kvfix {kvfix.__version__} read a log: {read_words(log)}"
    yield f"releases: {', '.join(named_versions(log)) or 'not named in the log'}"
    if log.releases.too_old:
        yield f"note: {log.releases.too_old}"
    who = log.who
    yield f"connector: {', '.join(sorted(who.connectors)) or 'not named'}; role: {', '.join(sorted(who.roles)) or '?'}"
    for setting in _SETTINGS.finditer(who.settings):
        yield f"setting: {setting['name']}={safe(setting['value'])}"
    for number, kind in enumerate(by_kind(findings)[:_FINDINGS]):
        yield from _finding(log, kind, full=number < 3)
    if not findings:
        yield safe(nothing_found(log))
    for line in log.failures.raised[:_EXCEPTIONS]:
        yield from _exception(line)
    for line in [each for each in log.failures.lines if each.name != "raised"][:_UNKNOWN]:
        yield f"unknown failure, line {line.number}: {safe(line.evidence.text)}"
    for process, line in list(log.failures.last.items())[:_PROCESSES]:
        yield f"last line of {process or 'a process without a name'}, line {line.number}: {safe(line.evidence.text)}"
    yield "counts: " + ", ".join(f"{name} {many}" for name, many in log.counts.most_common(20))


def _finding(log: Diagnosis, kind: list[LogFinding], full: bool) -> Iterator[str]:
    """Yield lines about the first finding in `kind`, and the number of findings in `kind`."""
    found = kind[0]
    rule, many = found.rule, sum(each.count for each in kind)
    times = f", {many} times" if many > 1 else ""
    sure = "" if found.is_certain else ", not certain"
    yield f"finding: {rule.code} {rule.name} ({found.severity.word}{times}{sure}): {safe(found.sentence)}"
    if not full:
        return
    yield f"  {advice.heading(found).lower()}: {safe(advice.cause(log, found))}"
    now, good = advice.remedy(log, found)
    if now:
        yield f"  do now: {safe(now)}"
    if good:
        yield f"  for good: {safe(good)}"
    for line in found.evidence[:2]:
        yield f"  line {line.line}: {safe(line.text)}"


def _exception(line: LogLine) -> Iterator[str]:
    fields = line.fields
    at = f" of {line.process}" if line.process else ""
    yield f"exception{at}, line {line.number}: {fields['class'] or 'fatal error'}: {safe(fields['text'])}"
    for file, number, function in fields["frames"][-_FRAMES:]:
        package = _PACKAGE.search(file)
        yield f"  {'/'.join(package[1].split('/')[-3:]) if package else '<file>'}:{number} {function}"
    if fields["source"]:
        yield f"  {safe(fields['source'])}"
