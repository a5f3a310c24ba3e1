"""Errors that a background thread of a connector logs, and goes on: what that thread does, and what is lost by it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_P2P = "lmcache/v1/storage_backend/p2p_backend.py"
_PD = "lmcache/v1/storage_backend/pd_backend.py"
_MOONCAKE = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
_ENGINE = "lmcache/v1/cache_engine.py"
_ALLOCATOR = "lmcache/v1/memory_allocators/tensor_memory_allocator.py"

PROBLEMS = (
    Problem(
        code="KVD255",
        name="fails-while-it-ends",
        severity=Severity.RISK,
        title="A part of the connector failed while the process was ending: a consequence, not the cause.",
        shows=(
            Logged("Error closing lmcache_worker: <error>", _ENGINE),
            Logged("Error closing storage_manager: <error>", _ENGINE),
            Logged("Error closing cache engine: <error>", _ENGINE),
            Logged("Error cleaning up instances: <error>", _ENGINE),
            Logged("Error destroying stats monitor: <error>", _ENGINE),
            Logged("Error closing hidden_state_store: <error>"),
            Logged("Error shutting down stats logger: <error>", _ENGINE),
            Logged("close operation timed out after <seconds>s. Continuing with shutdown", "lmcache/v1/manager.py"),
            Logged("destroy timed out after 15s. Continuing with shutdown", "lmcache/v1/manager.py"),
            Logged("Error destroying cache engine: <error>", "lmcache/v1/manager.py"),
            Logged("Error closing backend <backend>", "lmcache/v1/storage_backend/storage_manager.py"),
            Logged("Error stopping event loop: <error>", "lmcache/v1/storage_backend/storage_manager.py"),
            Logged(
                "Exception during connector <connector> shutdown.",
                "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="The process was asked to end, or was ending because of another error. What these parts still had to "
        "store may be lost; KV in memory is gone anyway.",
        now="nothing for this line; look for an earlier error if the engine was not asked to end",
        good="nothing to do",
    ),
    Problem(
        code="KVD256",
        name="periodic-thread-fails",
        severity=Severity.SLOW,
        title="A thread of LMCache that does the same thing every few seconds failed at it.",
        shows=(
            Logged("Error in PeriodicThread <thread>: <error>", "lmcache/v1/periodic_thread.py"),
            Logged("IrrecoverableException in PeriodicThread <thread>: <error>", "lmcache/v1/periodic_thread.py"),
        ),
        releases={"lmcache": ">=0.4"},
        quotes=True,
        sentence="{thread}: {error}",
        cause="It tries again at its next turn, but after an IrrecoverableException it ends. Its name says what is "
        "missing meanwhile: a health check, a heartbeat, statistics, the pin monitor. The error is its own cause.",
        now="what the error names; if it comes only once, nothing",
        good="what ends the error",
        sure=False,
    ),
    Problem(
        code="KVD257",
        name="health-check-fails",
        severity=Severity.SLOW,
        title="LMCache's health check failed: until it succeeds, LMCache neither stores nor loads.",
        shows=(
            Logged("Health check <check> raised exception: <error>", "lmcache/v1/health_monitor/base.py"),
            Logged("Health check <check> raised IrrecoverableException", "lmcache/v1/health_monitor/base.py"),
            Logged("Irrecoverable error in health monitor: <error>", "lmcache/v1/health_monitor/base.py"),
        ),
        releases={"lmcache": ">=0.4"},
        cause="The check asks a store whether it answers. If it raises, the store's client could not even ask: wrong "
        "address, missing credentials, a connection that was closed. After an irrecoverable error it is not asked "
        "again before a restart.",
        now="check the store at the address of remote_url from this container; restart the engine after an "
        "irrecoverable error",
        good="a store that is reachable before the engine starts",
    ),
    Problem(
        code="KVD258",
        name="allocator-counts-differ",
        severity=Severity.LEAK,
        title="LMCache's memory allocator found that its own counts do not add up.",
        shows=(
            Logged("Memory allocator size is inconsistent", _ALLOCATOR),
            Logged("Memory allocator has non-coalesced blocks", _ALLOCATOR),
            Logged("This implies a bug in the memory allocator", _ALLOCATOR),
        ),
        releases={"lmcache": ">=0.5"},
        cause="Free and allocated bytes are not the size of the heap: an object was freed twice, or freed while in "
        "use. Memory that is handed out from now on may overlap with a chunk.",
        now="restart the engine: what is cached cannot be trusted. KVFIX=check kvfix run -- CMD says which release of "
        "a pin came twice",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`; see the findings of pins and reference counts",
    ),
)
