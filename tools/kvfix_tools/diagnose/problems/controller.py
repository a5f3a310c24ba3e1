"""LMCache's controller: operations (lookup, pin, ...) that its workers answer with an error."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_WORKER = "lmcache/v1/cache_controller/worker.py"

PROBLEMS = (
    Problem(
        code="KVD827",
        name="controller-pin-broken",
        severity=Severity.SLOW,
        title="The controller's pin fails in every worker: it hands the lookup an argument of another name.",
        shows=(Logged("Worker error: LMCacheEngine.lookup() got an unexpected keyword argument 'request_id'"),),
        sentence="nothing was pinned",
        releases={"lmcache": "<0.3.12"},
        cause="The worker calls lookup(request_id=...), and the argument is lookup_id. Only pin does: lookup, move and "
        "clear of the controller go another way.",
        now="do without POST /pin; what must stay: a larger max_local_cpu_size",
        fixed={"lmcache": "0.3.12"},
        threads=(f"{_LMCACHE}issues/1707",),
    ),
    Problem(
        code="KVD828",
        name="controller-lookup-broken",
        severity=Severity.SLOW,
        title="The controller's lookup fails: the database of tokens lacks an attribute.",
        shows=(Logged("'ChunkedTokenDatabase' object has no attribute 'save_unfull_chunk'"),),
        releases={"lmcache": "<0.3.9"},
        cause="The controller makes its database without the engine's configuration, and these releases then leave "
        "save_unfull_chunk out.",
        now="upgrade LMCache on the controller's machine too: its release must be the workers'",
        fixed={"lmcache": "0.3.9"},
        threads=(f"{_LMCACHE}issues/1190",),
    ),
)
