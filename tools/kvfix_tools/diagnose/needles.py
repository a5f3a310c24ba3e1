"""Literals ("needles") that every line that matters contains. Lines without a needle are not parsed.

One search for all needles is much faster than parsing a line. Records of known problems add no needle, because kvfix
searches for them in lines of errors and warnings only.
"""

from __future__ import annotations

from ahocorasick_rs import BytesAhoCorasick, Implementation, MatchKind

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
