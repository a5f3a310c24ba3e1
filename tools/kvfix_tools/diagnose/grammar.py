"""Patterns of the log lines that kvfix understands (for the body of a message), and the words that such lines contain.

A pattern matches the wording of every release. `statements.json` lists the releases, places and levels of each logging
statement, and tests compare it with the patterns. Numbers become int, other values str.
"""

import re
from functools import partial
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

from kvfix_tools.diagnose.log_line import Fields, without_tokens


class Message(NamedTuple):
    """One kind of line.

    literal: the longest text of the pattern that each line of this kind contains.
    pattern: its groups are the fields.
    source: `lmcache`, `vllm` or `kvfix` for their log lines, `raised` for the text of an exception.
    fields: (name, True if it is a count) of each group.
    """

    name: str
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    fields: tuple[tuple[str, bool], ...]

    def values(self, match: re.Match[bytes]) -> Fields:
        """Return {field: count or text} of the groups that matched."""
        found: Fields = {}
        for (field, is_count), value in zip(self.fields, match.groups(), strict=True):
            if value is not None:
                text = value.decode("utf-8", "replace")
                found[field] = int(value) if is_count else without_tokens(text) if "," in text else text
        return found


MESSAGES: list[Message] = []

#: Groups that take digits only are counts; everything else is text.
_COUNT = re.compile(rb"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
#: In a pattern, `{name}` is a count. A value or an escaped character; a group.
_COUNTED, _VALUE = re.compile(rb"\{([a-z]\w*)\}"), re.compile(rb"<ID>|\\.|\[(?:\\.|[^]\\])+\]")
_GROUP = re.compile(rb"\([^()]*\)")
_ID = rb"(?P<request>[^\s,'\"()\[\]]+)"


def _message(source: str, name: str, pattern: bytes, literal: bytes = b"") -> None:
    pattern = _COUNTED.sub(rb"(?P<\1>\\d+)", pattern)
    # At most 18 digits, because int() refuses very long numbers.
    compiled = re.compile(pattern.replace(b"<ID>", _ID).replace(rb"\d+)", rb"\d{1,18})"))
    counts = _COUNT.findall(pattern)
    fields = tuple((field, field.encode() in counts) for field in compiled.groupindex)
    assert compiled.groups == len(fields), f"{name}: only named groups"
    MESSAGES.append(Message(name, literal or _longest_text(pattern), compiled, source, fields))


def _longest_text(pattern: bytes) -> bytes:
    """Return the longest part of a pattern that each match contains: no value, no group, no repeat."""
    pattern = _VALUE.sub(b"\0", pattern)
    while b"(" in pattern:
        pattern = _GROUP.sub(b"\0", pattern)
    return max(re.split(rb".[?*+]+|[\0.]", pattern), key=len)


_vllm, _lmcache, _kvfix, _raised = (partial(_message, source) for source in ("vllm", "lmcache", "kvfix", "raised"))

#: Kinds of lines that name vLLM's release.
RELEASE_IN = ("vllm_version", "vllm_server", "vllm_environment", "vllm_image")

_vllm(
    "stats",
    rb"(?:Engine {engine}: )?Avg prompt throughput: (?P<prompt>\d+\.?\d*) tokens/s, Avg generation throughput: "
    rb"(?P<generation>\d+\.?\d*) tokens/s, Running: {running} reqs, Waiting: {waiting} reqs"
    rb"(?:, Deferred: {deferred} reqs)?(?:, KV fetch: [^%]*? completed waiting)?"
    rb"(?:, Preemptions: {preemptions})?"
    rb"(?:, \w+ KV cache usage: (?P<usage>[\d.]+)%)?(?:, Prefix cache hit rate: (?P<local>[\d.]+)%)?"
    rb"(?:, External prefix cache hit rate: (?P<external>[\d.]+)%)?",
)
_vllm(
    "kv_failing",
    rb"Failing {objects} request\(s\) due to KV load failure \(failure_policy=fail, {tokens} tokens "
    rb"affected\)(?:\. Request IDs: )?(?P<requests>.*)",
)
_vllm(
    "kv_recovered", rb"Recovered from KV load failure: {objects} request\(s\) rescheduled \({tokens} tokens affected\)"
)
_vllm("kv_waiting", rb"<ID> is still in WAITING_FOR_REMOTE_KVS state")
_vllm("broadcast", rb"No available shared memory broadcast block found in {seconds}")
# The transfers of NixlConnector and MooncakeConnector in an interval (nixl/stats.py). Other connectors log other
# numbers.
_vllm(
    "moved",
    rb"KV Transfer metrics: Num successful transfers={transfers}, .*?Avg MB per transfer=(?P<size>[\d.]+), "
    rb"Throughput \(MB/s\)=(?P<rate>[\d.]+)",
)
# The API server or the engine has started; uvicorn answered a request with 500.
_vllm("up", rb"Application startup complete")
_vllm("engine_up", rb"init engine \(profile")
_vllm("answered_500", rb'" 500 Internal Server Error')
_vllm("fatal", rb"EngineCore encountered a fatal error")
_vllm("draft_groups", rb"KV offloading: EAGLE/MTP draft attention groups (?P<groups>[^\n]{1,200}?) detected")
_vllm("vllm_version", rb"(?:Initializing a|Dumping input data for) V[01] LLM engine \(v(?P<vllm>[^\s)]+)\)")
# The API server's first line names the release. The logo may stand before it, and the last character of the logo is
# U+2588. The environment at the beginning of a report (collect_env) has the release too, and so does the image's name.
_vllm("vllm_server", rb"(?:vLLM (?:API )?server|\xe2\x96\x88 )\s?version (?P<vllm>\d[^\s,]*)")
_vllm("vllm_environment", rb"vLLM Version\s*:\s*v?(?P<vllm>\d\S*)")
_vllm("vllm_image", rb"(?<!\w)vllm/vllm-openai:v(?P<vllm>\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)")

#: Lookahead for the place of LMCache's statement or the end of the line.
_TO_PLACE = rb"(?=\s(?:\x1b?\[3m)?\(\w+\.py:\d+:|\s*$)"


# Lines of kvfix's own recorder are JSON (kvfix_tools.recording). In a bundle of `kvfix dump`, the first line of a file
# follows the header of the archive.
_kvfix("recorded", rb'(?:^|\0)\{"kind":"(?P<kind>recorder|connector|event)"')

# The adapter of LMCacheConnectorV1 (lmcache/integration/vllm/vllm_v1_adapter.py). From 0.3.14 on a line has vLLM's
# computed tokens; before, `need to load` may be negative.
_lmcache("creating", rb"Creating LMCacheEngine instance (?P<instance>\S+)")
_lmcache(
    "asked",
    rb"Reqid: <ID>, Total tokens {total}, (?:Inference Engine computed tokens: {computed}, )?"
    rb"LMCache hit tokens: (?:{hit}, (?:but )?need to load: (?P<need>-?\d+)(?: < min_retrieve {least})?"
    rb"|None)",
)
_lmcache(
    "capped", rb"Reqid: <ID>, Chunked KV loading: capped from (?P<need>-?\d+) to (?P<capped>-?\d+) external tokens"
)
_lmcache("due", rb"Scheduled to load {hit} tokens (?:\({computed} cached in vLLM\) )?for request <ID>")
_lmcache(
    "storing",
    rb"Storing KV cache for (?P<tokens>-?\d+) out of {total} tokens \(skip_leading_tokens={skip}\) "
    rb"for request <ID>",
)
_lmcache("stored", rb"(?:\[req_id=(?P<request>[^\]\n]*)\] )?Stored {tokens} out of total {total} tokens")
_lmcache(
    "retrieved",
    rb"(?:\[req_id=(?P<request>[^\]\n]*)\] )?Retrieved {tokens} out of (?:total )?{required}"
    rb"(?: required tokens \(from {total} total tokens\)| out of total \d+ tokens)",
)
_lmcache("short", rb"Num retrieved tokens: {tokens}, num expected tokens: {expected}")
_lmcache("load_failed", rb"Request <ID> failed to load {tokens} tokens across {blocks} blocks")
_lmcache("rolled_back", rb"Request <ID> rolled back from {before} to {now} tokens")
_lmcache("unretrievable", rb"The cache block is in the storage, but it can't be retrieved")
_lmcache("save_skipped", rb"Skipping KV save for request <ID>: .*\(slot_mapping={slots}, token_ids={ids}\)")
_lmcache("aborted", rb"Skipping abort-time (?:backend cleanup|async lookup cancel) for request (?P<request>[^\s,:]+):")

# Lookups of the in-process mode.
_lmcache("lookup_timeout", rb"Timeout occurred for rank (?P<rank>\w+)")
_lmcache("lookup_given_up", rb"Request <ID> is still waiting for async lookup after {seconds} seconds")
_lmcache(
    "ranks_differ", rb"Lookup results \(number of hit tokens\) differ across [^:]* ranks: (?P<results>.*?)\.(?:\s|$)"
)
_lmcache(
    "hash_seed",
    rb"(?P<why>Using builtin hash without|Centralized cache sharing detected but|P/D Disaggregation detected but) "
    rb"PYTHONHASHSEED (?:not )?set",
)

_lmcache("configured", rb"LMCache Configuration: (?P<settings>.+?)" + _TO_PLACE)
_lmcache("engine_configured", rb"Creating LMCacheEngine with config: (?P<settings>.+?)" + _TO_PLACE)
_lmcache("peer_asked", rb"Got layout info from controller: (?P<layout>.+?)" + _TO_PLACE)

# Memory.
_lmcache("pin_timeout", rb"Pin timeout detected for MemoryObj (?P<object>\S+)\. Pin count: {pins}")
_lmcache("forced_unpin", rb"Force unpinned {objects} timeout objects")
_lmcache("double_unpin", rb"Pin count of MemoryObj (?P<object>\w+?) ?is negative: (?P<count>-?\d+)")
_lmcache("no_candidates", rb"No eviction candidates found in local cpu backend")
_lmcache("not_stored", rb"Local cpu memory under pressure so choosing to (?P<what>not store|store only)")
# From 0.4.3 on the error is a whole traceback (manager.py), so the message ends about twenty lines below its beginning.
_lmcache(
    "degraded",
    rb"(?:(?P<what>Failed during post_init|Failed to initialize [\w ]+): (?P<error>.*?)\.?|(?:^|\s)\.) "
    rb"System will operate in degraded mode",
)

# The multi-process connector and its server.
_lmcache(
    "mp_timeout",
    rb"(?P<what>LOOKUP|QUERY_PREFETCH_STATUS)(?: request)?"
    rb"(?: to (?P<server>\S+))? timed out(?: after (?P<waited>[\d.]+)s)?\. Marking",
)
_lmcache("mp_unhealthy", rb"LMCache server is unhealthy")
_lmcache("mp_healthy", rb"LMCache server is healthy again")
_lmcache("mp_failed", rb"Something went wrong when processing the (?P<what>store|retrieve) request for request_id=<ID>")
_lmcache("mp_bypassed", rb"Bypassing LMCache for request <ID> after a failed async KV load")
_lmcache("mp_preempted", rb"<preempted> by (?P<what>preempted|resumed) requests: ")
_lmcache("mp_resumed", rb"<resume-load> req=<ID> apc={computed} lmcache={hit} load={granted}")
_lmcache("mp_servers_differ", rb"\[req=(?P<request>[^\]\n]*)\] LMCache hit mismatch across servers")
_lmcache("no_handler", rb"No handler registered for (?:request type|operation) (?P<operation>[\w.]+)")
_lmcache("transfer_mode", rb"Supported transfer mode: (?P<mode>\w+)")
_lmcache("unregistered", rb"Rejecting (?P<what>\w+) for unregistered GPU instance ID {instance}")
# A worker unregisters when it ends. The server logs different lines for known and unknown workers.
_lmcache("good_bye", rb"Unregistered KV cache for GPU ID {instance}")
_lmcache("good_bye_of_none", rb"No registered GPU context found for instance ID {instance}")
_lmcache(
    "reaped",
    rb"Reaped (?P<what>GPU|non-GPU) instance {instance}: silent for (?P<silent>[\d.]+)s "
    rb"\(pinged=(?P<pinged>\w+)\)",
)
_lmcache("keys_missing", rb"Some keys not found during retrieve!")
_lmcache("underflow", rb"(?P<what>STORE|RETRIEVE) block ID underflow for request_id=<ID>:")
_lmcache("mp_stored", rb"Stored {tokens} tokens in (?P<took>[\d.]+) seconds")
_lmcache("mp_retrieved", rb"Retrieved {tokens} tokens in (?P<took>[\d.]+) seconds")
_lmcache(
    "mp_prefetched",
    rb"Prefetch request completed \(L1\+L2\): {hit}/{wanted} .*?"
    rb"\((?:external_)?request_id=(?P<request>[^,)]+)",
)

# Releases.
_lmcache(
    "version",
    rb"LMCache initialized for role (?P<role>[\w.]+) with version (?P<lmcache>[^\s,]+), vllm version (?P<vllm>[^\s,]+)",
)

# The multi-process connector does not log its release. The line numbers of these statements show it.
_lmcache("mp_started", rb"LMCache MP worker adapter created")
_lmcache("mp_registers", rb"Registering kv caches")

# Texts of exceptions, at the end of a traceback.
_raised(
    "mismatch",
    rb"Mismatch in tokens to load: (?P<granted>-?\d+) vs {hit} \(tokens in lmcache\) - {computed} "
    rb"\(tokens in vllm\) - {spare}(?: \(full lmcache hits [^)]*\))?(?: for request <ID>)?",
)
_raised(
    "resume_differs",
    rb"Preempted request <ID> has num_computed_tokens {computed} but (?P<against>expected|lmcache_cached_tokens"
    rb"|max\(lmcache_cached_tokens, vllm_cached_tokens\)) (?:= )?{expected}",
)
_raised("no_load_spec", rb"Request <ID> is preempted but was not given a load spec")
_raised(
    "server_silent",
    rb"LMCache server did not respond (?:to (?P<operation>(?!unreg)\w+) )?within [\d.]+s"
    rb"|Cannot reach the LMCache MP server at '(?P<server>[^']+)' within",
    b"LMCache ",
)
_raised("no_tracker", rb"Request tracker for request_id <ID> not found")


_literals_in = BytesAhoCorasick(
    [message.literal for message in MESSAGES], implementation=Implementation.DFA
).find_matches_as_indexes


def containing(text: bytes) -> list[Message]:
    """Return the messages whose literal is in the text, in the order of MESSAGES."""
    return [MESSAGES[number] for number in sorted({number for number, _, _ in _literals_in(text, overlapping=True)})]


# Every line that matters contains one of these needles. Lines without a needle are not parsed: one search for all
# needles is much faster than parsing a line. Records of known problems add no needle, because kvfix searches for them
# in lines of errors and warnings only.

#: `[2026-11-21 01:41:27,007] LMCache INFO: `, the same in 0.3.0 to 0.5.6.
FRAME = b"] LMCache "
#: A test shows that these needles cover every message of the grammar.
NEEDLES: tuple[bytes, ...] = (
    b" LMCache ", b":lmcache.", b"_mp_connector)", b'{"kind":"',
    b"throughput: ", b"KV load failure", b"FOR_REMOTE_KVS", b"broadcast block", b"Initializing a V", b"assert ",
    b"server version ", b"\xe2\x96\x88  version ", b"vLLM Version", b"vllm/vllm-openai:v",
    b'", line ', b'.py", ', b"KV offloading: EAGLE",
    b"rror", b"ERROR", b"WARN", b"Traceback (", b"xception", b"fault", b"illed", b"terminate called",
    b"kv_connector", b"connector with name", b"[shutdown]", b"Thread ", b"Process ", b".cpp:",
    b"Assertion `", b"undefined symbol", b"shared object", b"GLIBC", b"CXXABI_", b"FATAL", b"core dumped", b"Aborted",
    b"double free", b"free(): ", b"malloc(): ", b"corrupted ", b"code 137", b"Exit Code: ",
    b"cannot import name", b"received by PID", b"backtrace (tid", b"Ping timed out", b"panicked at", b"allocate mask",
    b"KV Transfer m", b"startup complete", b"init engine (", b"500 Internal", b"Cannot access data ",
    b"with signal ", b"Check failed", b"what(): ", b"Fatal: ", b"retry count exceeded", b"#0  ",
)  # fmt: skip
#: Finds the needles in a line without LMCache's frame. LeftmostFirst compares many bytes at once.
in_line = BytesAhoCorasick(
    NEEDLES, matchkind=MatchKind.LeftmostFirst, implementation=Implementation.DFA
).find_matches_as_indexes
