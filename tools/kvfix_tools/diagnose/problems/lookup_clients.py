"""The scheduler's lookup client of LMCache in the engine's own process."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

PROBLEMS = (
    Problem(
        code="KVD825",
        name="lookup-socket-out-of-step",
        severity=Severity.SLOW,
        title="After one lookup that timed out every later lookup of that rank fails: nothing is found any more.",
        shows=(Logged("ZMQ error for rank <rank>: Operation cannot be accomplished in current state"),),
        sentence="rank {rank}",
        connectors=("LMCacheConnectorV1", "MultiConnector"),
        releases={"lmcache": "<0.3.9.post1"},
        cause="The socket waits for the answer that did not come, and takes no other question. The first time-out came "
        "because the worker was busy: a slow remote store, or a CPU cache that is full.",
        now="restart vLLM; a larger max_local_cpu_size, fewer requests at once (--max-num-seqs), "
        "lookup_timeout_ms: 10000 (LMCACHE_LOOKUP_TIMEOUT_MS)",
        fixed={"lmcache": "0.3.9.post1"},
        threads=("https://github.com/LMCache/LMCache/issues/2020", "https://github.com/LMCache/LMCache/pull/1929"),
    ),
)
