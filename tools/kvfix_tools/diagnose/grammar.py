"""Patterns of the log lines that kvfix understands, for the body of a message, and the words that such lines contain.

A pattern matches the wording of every release. `statements.json` lists the releases, places and levels of each logging
statement, and tests compare it with the patterns. Numbers become int, other values str.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind


class Message(NamedTuple):
    """One kind of line.

    starts: beginnings of the body after LMCache's frame; empty for anywhere in the line.
    literal: text that each line of this kind contains. pattern: its groups are the fields.
    source: `lmcache`, `vllm` or `kvfix` for their log lines, `raised` for the text of an exception.
    fields: (name, True if it is a count) of each group.
    """

    name: str
    starts: tuple[bytes, ...]
    literal: bytes
    pattern: re.Pattern[bytes]
    source: str
    fields: tuple[tuple[str, bool], ...]


MESSAGES: list[Message] = []

#: Groups that take digits only are counts; everything else is text.
_COUNT = re.compile(rb"\(\?P<(\w+)>(?:-\?)?\\d\+\)")
_ID = rb"(?P<request>[^\s,'\"()\[\]]+)"


def _message(name: str, source: str, starts: str, literal: str, pattern: bytes) -> None:
    # At most 18 digits, because int() refuses very long numbers.
    compiled = re.compile(pattern.replace(b"<ID>", _ID).replace(rb"\d+)", rb"\d{1,18})"))
    heads = tuple(start.encode() for start in starts.split("|") if start)
    counts = _COUNT.findall(pattern)
    fields = tuple((field, field.encode() in counts) for field in compiled.groupindex)
    assert compiled.groups == len(fields), f"{name}: only named groups"
    MESSAGES.append(Message(name, heads, literal.encode(), compiled, source, fields))


def _lmcache(name: str, starts: str, literal: str, pattern: bytes) -> None:
    _message(name, "lmcache", starts, literal, pattern)


#: Kinds of lines that name vLLM's release.
RELEASE_IN = ("vllm_version", "vllm_server", "vllm_environment", "vllm_image")

_message(
    "stats", "vllm", "", "Avg prompt throughput: ",
    rb"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>\d+\.?\d*) tokens/s, Avg generation throughput: "
    rb"(?P<generation>\d+\.?\d*) tokens/s, Running: (?P<running>\d+) reqs, Waiting: (?P<waiting>\d+) reqs"
    rb"(?:, Deferred: (?P<deferred>\d+) reqs)?(?:, KV fetch: [^%]*? completed waiting)?"
    rb"(?:, Preemptions: (?P<preemptions>\d+))?"
    rb"(?:, \w+ KV cache usage: (?P<usage>[\d.]+)%)?(?:, Prefix cache hit rate: (?P<local>[\d.]+)%)?"
    rb"(?:, External prefix cache hit rate: (?P<external>[\d.]+)%)?",
)  # fmt: skip
_message(
    "kv_failing", "vllm", "", " due to KV load failure",
    rb"Failing (?P<objects>\d+) request\(s\) due to KV load failure \(failure_policy=fail, (?P<tokens>\d+) tokens "
    rb"affected\)(?:\. Request IDs: )?(?P<requests>.*)",
)  # fmt: skip
_message(
    "kv_recovered", "vllm", "", "Recovered from KV load failure: ",
    rb"Recovered from KV load failure: (?P<objects>\d+) request\(s\) rescheduled \((?P<tokens>\d+) tokens affected\)",
)  # fmt: skip
_message(
    "kv_waiting", "vllm", "", " is still in WAITING_FOR_REMOTE_KVS state",
    rb"<ID> is still in WAITING_FOR_REMOTE_KVS state",
)  # fmt: skip
_message(
    "broadcast", "vllm", "", "No available shared memory broadcast block found",
    rb"No available shared memory broadcast block found in (?P<seconds>\d+)",
)  # fmt: skip
# The transfers of NixlConnector and MooncakeConnector in an interval (nixl/stats.py). Other connectors log other
# numbers.
_message(
    "moved", "vllm", "", "KV Transfer metrics: ",
    rb"KV Transfer metrics: Num successful transfers=(?P<transfers>\d+), .*?Avg MB per transfer=(?P<size>[\d.]+), "
    rb"Throughput \(MB/s\)=(?P<rate>[\d.]+)",
)  # fmt: skip
# The API server or the engine has started; uvicorn answered a request with 500.
_message("up", "vllm", "", "startup complete", rb"Application startup complete")
_message("engine_up", "vllm", "", "init engine (", rb"init engine \(profile")
_message("answered_500", "vllm", "", "500 Internal", rb'" 500 Internal Server Error')
_message("fatal", "vllm", "", "EngineCore encountered a fatal error", rb"EngineCore encountered a fatal error")
_message(
    "draft_groups", "vllm", "", "KV offloading: EAGLE/MTP draft attention groups ",
    rb"KV offloading: EAGLE/MTP draft attention groups (?P<groups>[^\n]{1,200}?) detected",
)  # fmt: skip
_message(
    "vllm_version", "vllm", "", " LLM engine (v",
    rb"(?:Initializing a|Dumping input data for) V[01] LLM engine \(v(?P<vllm>[^\s)]+)\)",
)  # fmt: skip
# The API server's first line names the release. The logo may stand before it, and the last character of the logo is
# U+2588. The environment at the beginning of a report (collect_env) and the name of the image name the release too.
_message(
    "vllm_server", "vllm", "", " version ",
    rb"(?:vLLM (?:API )?server|\xe2\x96\x88 )\s?version (?P<vllm>\d[^\s,]*)",
)  # fmt: skip
_message("vllm_environment", "vllm", "", "vLLM Version", rb"vLLM Version\s*:\s*v?(?P<vllm>\d\S*)")
_message(
    "vllm_image", "vllm", "", "vllm/vllm-openai:v",
    rb"(?<!\w)vllm/vllm-openai:v(?P<vllm>\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)",
)  # fmt: skip

#: Lookahead for the place of LMCache's statement or the end of the line.
_TO_PLACE = rb"(?=\s(?:\x1b?\[3m)?\(\w+\.py:\d+:|\s*$)"


# Lines of kvfix's own recorder are JSON (kvfix_tools.recording). In a bundle of `kvfix dump`, the first line of a file
# follows the header of the archive.
_message("recorded", "kvfix", "", '{"kind":"', rb'(?:^|\0)\{"kind":"(?P<kind>recorder|connector|event)"')

# The adapter of LMCacheConnectorV1 (lmcache/integration/vllm/vllm_v1_adapter.py). From 0.3.14 on a line has vLLM's
# computed tokens; before, `need to load` may be negative.
_lmcache(
    "creating", "Creating LMCacheEngine instance ", "Creating LMCacheEngine instance ",
    rb"Creating LMCacheEngine instance (?P<instance>\S+)",
)  # fmt: skip
_lmcache(
    "asked", "Reqid: ", "LMCache hit tokens: ",
    rb"Reqid: <ID>, Total tokens (?P<total>\d+), (?:Inference Engine computed tokens: (?P<computed>\d+), )?"
    rb"LMCache hit tokens: (?:(?P<hit>\d+), (?:but )?need to load: (?P<need>-?\d+)(?: < min_retrieve (?P<least>\d+))?"
    rb"|None)",
)  # fmt: skip
_lmcache(
    "capped", "Reqid: ", "Chunked KV loading: capped from",
    rb"Reqid: <ID>, Chunked KV loading: capped from (?P<need>-?\d+) to (?P<capped>-?\d+) external tokens",
)  # fmt: skip
_lmcache(
    "due", "Scheduled to load ", "Scheduled to load ",
    rb"Scheduled to load (?P<hit>\d+) tokens (?:\((?P<computed>\d+) cached in vLLM\) )?for request <ID>",
)  # fmt: skip
_lmcache(
    "storing", "Storing KV cache for ", "Storing KV cache for ",
    rb"Storing KV cache for (?P<tokens>-?\d+) out of (?P<total>\d+) tokens \(skip_leading_tokens=(?P<skip>\d+)\) "
    rb"for request <ID>",
)  # fmt: skip
_lmcache(
    "stored", "[req_id=|Stored ", " out of total ",
    rb"(?:\[req_id=(?P<request>[^\]\n]*)\] )?Stored (?P<tokens>\d+) out of total (?P<total>\d+) tokens",
)  # fmt: skip
_lmcache(
    "retrieved", "[req_id=|Retrieved ", "Retrieved ",
    rb"(?:\[req_id=(?P<request>[^\]\n]*)\] )?Retrieved (?P<tokens>\d+) out of (?:total )?(?P<required>\d+)"
    rb"(?: required tokens \(from (?P<total>\d+) total tokens\)| out of total \d+ tokens)",
)  # fmt: skip
_lmcache(
    "short", "Num retrieved tokens", "Num retrieved tokens: ",
    rb"Num retrieved tokens: (?P<tokens>\d+), num expected tokens: (?P<expected>\d+)",
)  # fmt: skip
_lmcache(
    "load_failed", "Request ", " failed to load ",
    rb"Request <ID> failed to load (?P<tokens>\d+) tokens across (?P<blocks>\d+) blocks",
)  # fmt: skip
_lmcache(
    "rolled_back", "Request ", " rolled back from ",
    rb"Request <ID> rolled back from (?P<before>\d+) to (?P<now>\d+) tokens",
)  # fmt: skip
_lmcache(
    "unretrievable", "The cache block is in", "The cache block is in the storage, but it can't be retrieved",
    rb"The cache block is in the storage, but it can't be retrieved",
)  # fmt: skip
_lmcache(
    "save_skipped", "Skipping KV save", "Skipping KV save for request",
    rb"Skipping KV save for request <ID>: .*\(slot_mapping=(?P<slots>\d+), token_ids=(?P<ids>\d+)\)",
)  # fmt: skip
_lmcache(
    "aborted", "Skipping abort-time", "Skipping abort-time ",
    rb"Skipping abort-time (?:backend cleanup|async lookup cancel) for request (?P<request>[^\s,:]+):",
)  # fmt: skip

# Lookups of the in-process mode.
_lmcache(
    "lookup_timeout", "Timeout occurred for rank", "Timeout occurred for rank",
    rb"Timeout occurred for rank (?P<rank>\w+)",
)  # fmt: skip
_lmcache(
    "lookup_given_up", "Request ", " is still waiting for async lookup",
    rb"Request <ID> is still waiting for async lookup after (?P<seconds>\d+) seconds",
)  # fmt: skip
_lmcache(
    "ranks_differ", "Lookup results (number", "Lookup results (number of hit tokens) differ",
    rb"Lookup results \(number of hit tokens\) differ across [^:]* ranks: (?P<results>.*?)\.(?:\s|$)",
)  # fmt: skip
_lmcache(
    "hash_seed", "Using builtin hash|Centralized cache|P/D Disaggregation", "PYTHONHASHSEED",
    rb"(?P<why>Using builtin hash without|Centralized cache sharing detected but|P/D Disaggregation detected but) "
    rb"PYTHONHASHSEED (?:not )?set",
)  # fmt: skip

_lmcache(
    "configured", "LMCache Configuration", "LMCache Configuration: ",
    rb"LMCache Configuration: (?P<settings>.+?)" + _TO_PLACE,
)  # fmt: skip
_lmcache(
    "engine_configured", "Creating LMCacheEngine", "Creating LMCacheEngine with config: ",
    rb"Creating LMCacheEngine with config: (?P<settings>.+?)" + _TO_PLACE,
)  # fmt: skip
_lmcache(
    "peer_asked", "Got layout info", "Got layout info from controller: ",
    rb"Got layout info from controller: (?P<layout>.+?)" + _TO_PLACE,
)  # fmt: skip

# Memory.
_lmcache(
    "pin_timeout", "Pin timeout detected", "Pin timeout detected for MemoryObj",
    rb"Pin timeout detected for MemoryObj (?P<object>\S+)\. Pin count: (?P<pins>\d+)",
)  # fmt: skip
_lmcache(
    "forced_unpin", "Force unpinned", "Force unpinned ",
    rb"Force unpinned (?P<objects>\d+) timeout objects",
)  # fmt: skip
_lmcache(
    "double_unpin", "Pin count of MemoryObj", "is negative: ",
    rb"Pin count of MemoryObj (?P<object>\w+?) ?is negative: (?P<count>-?\d+)",
)  # fmt: skip
_lmcache(
    "no_candidates", "No eviction candidates", "No eviction candidates found in local cpu backend",
    rb"No eviction candidates found in local cpu backend",
)  # fmt: skip
_lmcache(
    "not_stored", "Local cpu memory under", "Local cpu memory under pressure so choosing to",
    rb"Local cpu memory under pressure so choosing to (?P<what>not store|store only)",
)  # fmt: skip
# From 0.4.3 on the error is a whole traceback (manager.py), so the message ends about twenty lines below its beginning.
_lmcache(
    "degraded", "Failed during post_init|Failed to initialize", "System will operate in degraded mode",
    rb"(?:(?P<what>Failed during post_init|Failed to initialize [\w ]+): (?P<error>.*?)\.?|(?:^|\s)\.) "
    rb"System will operate in deg",
)  # fmt: skip

# The multi-process connector and its server.
_lmcache(
    "mp_timeout", "LOOKUP |QUERY_PREFETCH", " timed out", rb"(?P<what>LOOKUP|QUERY_PREFETCH_STATUS)(?: request)?"
    rb"(?: to (?P<server>\S+))? timed out(?: after (?P<waited>[\d.]+)s)?\. Marking",
)  # fmt: skip
_lmcache("mp_unhealthy", "LMCache server is", "LMCache server is unhealthy", rb"LMCache server is unhealthy")
_lmcache("mp_healthy", "LMCache server is", "LMCache server is healthy again", rb"LMCache server is healthy again")
_lmcache(
    "mp_failed", "Something went wrong", "Something went wrong when processing the ",
    rb"Something went wrong when processing the (?P<what>store|retrieve) request for request_id=<ID>",
)  # fmt: skip
_lmcache(
    "mp_bypassed", "Bypassing LMCache", "Bypassing LMCache for request ",
    rb"Bypassing LMCache for request <ID> after a failed async KV load",
)  # fmt: skip
_lmcache(
    "mp_preempted", "<preempted> by", "<preempted> by ",
    rb"<preempted> by (?P<what>preempted|resumed) requests: ",
)  # fmt: skip
_lmcache(
    "mp_resumed", "<resume-load>", "<resume-load> req=",
    rb"<resume-load> req=<ID> apc=(?P<computed>\d+) lmcache=(?P<hit>\d+) load=(?P<granted>\d+)",
)  # fmt: skip
_lmcache(
    "mp_servers_differ", "[req=", " LMCache hit mismatch across servers",
    rb"\[req=(?P<request>[^\]\n]*)\] LMCache hit mismatch across servers",
)  # fmt: skip
_lmcache(
    "no_handler", "No handler registered", "No handler registered for ",
    rb"No handler registered for (?:request type|operation) (?P<operation>[\w.]+)",
)  # fmt: skip
_lmcache("transfer_mode", "Supported transfer", "Supported transfer mode: ", rb"Supported transfer mode: (?P<mode>\w+)")
_lmcache(
    "unregistered", "Rejecting ", "Rejecting ",
    rb"Rejecting (?P<what>\w+) for unregistered GPU instance ID (?P<instance>\d+)",
)  # fmt: skip
# A worker unregisters when it ends. The server logs different lines for known and unknown workers.
_lmcache(
    "good_bye", "Unregistered KV cache", "Unregistered KV cache for GPU ID ",
    rb"Unregistered KV cache for GPU ID (?P<instance>\d+)",
)  # fmt: skip
_lmcache(
    "good_bye_of_none", "No registered GPU", "No registered GPU context found for instance ID ",
    rb"No registered GPU context found for instance ID (?P<instance>\d+)",
)  # fmt: skip
_lmcache(
    "reaped", "Reaped ", "Reaped ",
    rb"Reaped (?P<what>GPU|non-GPU) instance (?P<instance>\d+): silent for (?P<silent>[\d.]+)s "
    rb"\(pinged=(?P<pinged>\w+)\)",
)  # fmt: skip
_lmcache(
    "keys_missing", "Some keys not found", "Some keys not found during retrieve!",
    rb"Some keys not found during retrieve!",
)  # fmt: skip
_lmcache(
    "underflow", "STORE block ID|RETRIEVE block ID", " block ID underflow for request_id=",
    rb"(?P<what>STORE|RETRIEVE) block ID underflow for request_id=<ID>:",
)  # fmt: skip
_lmcache("mp_stored", "Stored ", " tokens in ", rb"Stored (?P<tokens>\d+) tokens in (?P<took>[\d.]+) seconds")
_lmcache("mp_retrieved", "Retrieved ", " tokens in ", rb"Retrieved (?P<tokens>\d+) tokens in (?P<took>[\d.]+) seconds")
_lmcache(
    "mp_prefetched", "Prefetch request completed", "Prefetch request completed (L1+L2): ",
    rb"Prefetch request completed \(L1\+L2\): (?P<hit>\d+)/(?P<wanted>\d+) .*?"
    rb"\((?:external_)?request_id=(?P<request>[^,)]+)",
)  # fmt: skip

# Releases.
_lmcache(
    "version", "LMCache initialized for", "LMCache initialized for role ",
    rb"LMCache initialized for role (?P<role>[\w.]+) with version (?P<lmcache>[^\s,]+), vllm version (?P<vllm>[^\s,]+)",
)  # fmt: skip

# The multi-process connector does not log its release. The line numbers of these statements show it.
_lmcache("mp_started", "LMCache MP worker", "LMCache MP worker adapter created", rb"LMCache MP worker adapter created")
_lmcache("mp_registers", "Registering kv", "Registering kv caches", rb"Registering kv caches")

# Texts of exceptions, at the end of a traceback.
_message(
    "mismatch", "raised", "", "Mismatch in tokens to load",
    rb"Mismatch in tokens to load: (?P<granted>-?\d+) vs (?P<hit>\d+) \(tokens in lmcache\) - (?P<computed>\d+) "
    rb"\(tokens in vllm\) - (?P<spare>\d+)(?: \(full lmcache hits [^)]*\))?(?: for request <ID>)?",
)  # fmt: skip
_message(
    "resume_differs", "raised", "", "Preempted request ",
    rb"Preempted request <ID> has num_computed_tokens (?P<computed>\d+) but (?P<against>expected|lmcache_cached_tokens"
    rb"|max\(lmcache_cached_tokens, vllm_cached_tokens\)) (?:= )?(?P<expected>\d+)",
)  # fmt: skip
_message(
    "no_load_spec", "raised", "", "is preempted but was not given a load spec",
    rb"Request <ID> is preempted but was not given a load spec",
)  # fmt: skip
_message(
    "server_silent", "raised", "", "LMCache ",
    rb"LMCache server did not respond (?:to (?P<operation>(?!unreg)\w+) )?within [\d.]+s"
    rb"|Cannot reach the LMCache MP server at '(?P<server>[^']+)' within",
)  # fmt: skip
_message(
    "no_tracker", "raised", "", "Request tracker for request_id ", rb"Request tracker for request_id <ID> not found"
)

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
    b'", line ', b'.py", ', b".py, in ", b"KV offloading: EAGLE",
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
