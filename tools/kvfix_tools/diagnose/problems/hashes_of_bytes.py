"""Hashes that are bytes, or text, where LMCache counts on a number."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_LMCACHE = "https://github.com/LMCache/LMCache/"
_FORMAT = "unsupported format string passed to bytes.__format__"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD739",
        name="key-of-bytes-cannot-be-written",
        severity=Severity.SLOW,
        title="LMCache cannot write a chunk's key as text: nothing is stored or found outside of memory.",
        shows=(
            *either(_FORMAT),
            *(Logged(f"{doing}: {_FORMAT}") for doing in ("batched put error", "Remote connection failed in contains")),
        ),
        sentence="the hash in a chunk's key is bytes",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.13"},
        cause="pre_caching_hash_algorithm is sha256 or sha256_cbor, whose hashes are bytes in vLLM 0.11 and newer, "
        "and these releases write a key's hash as a number (utils.py, to_string). Every put to and lookup in a remote "
        "store, a disk or Mooncake fails so.",
        now="pre_caching_hash_algorithm: builtin (LMCACHE_PRE_CACHING_HASH_ALGORITHM=builtin) and PYTHONHASHSEED=0 "
        "for every process, on Python 3.12 or newer; restart all",
        fixed={"lmcache": "0.3.13"},
        threads=(_LMCACHE + "issues/2166", _LMCACHE + "pull/2450"),
    ),
    Problem(
        code="KVD738",
        name="asynchronous-lookup-of-bytes",
        severity=Severity.CRASH,
        title="enable_async_loading does not go together with this hash: the lookup cannot be sent or read.",
        shows=(
            Failed(kind="ValidationError", text="Expected `int`, got `bytes` - at `$.hashes["),
            Failed(kind="OverflowError", text="can't serialize ints", through="lookup_client/"),
            Logged("Expected `int`, got `bytes` - at `$.hashes["),
        ),
        sentence="the hashes of the lookup are no numbers of 64 bits",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.10,<0.4.6"},
        cause="pre_caching_hash_algorithm is sha256 or sha256_cbor: bytes, or a number of 256 bits in older vLLM. The "
        "message of the asynchronous lookup takes numbers of 64 bits alone (LookupRequestMsg).",
        now="enable_async_loading: false; or pre_caching_hash_algorithm: builtin and PYTHONHASHSEED=0 for every "
        "process, on Python 3.12 or newer; restart",
        fixed={"lmcache": "0.4.6"},
        threads=(_LMCACHE + "issues/2997", _LMCACHE + "pull/2999"),
    ),
    Problem(
        code="KVD737",
        name="key-with-a-text-for-its-hash",
        severity=Severity.CRASH,
        title="A script makes a key of LMCache's with a text in place of the hash, which this LMCache does not take.",
        shows=(Failed(kind="ValueError", text="Unknown format code 'x' for object of type"),),
        sentence="the hash in a key is a text",
        sure=False,
        cause="From 0.3.7 on LMCache writes a key's hash as a number (utils.py, to_string). The script is of an older "
        "one: that of production-stack's chart which waits for the cache server (wait-for-cache-server) does so, and "
        "its pod never starts. The server itself is well.",
        now="a chart of the same month as the image, or its init container taken out (kubectl edit deployment); the "
        "server answers if `Connected by` stands in its log",
        good="production-stack and lmcache/vllm-openai with fixed tags that were released together, no latest-nightly",
        threads=("https://github.com/vllm-project/production-stack/issues/723",),
    ),
)
