"""Warnings after which the engine runs on, and KV is lost, slow, or may be wrong."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1/"

PROBLEMS = (
    Problem(
        code="KVD292",
        name="store-outlives-its-blocks",
        severity=Severity.WRONG,
        title="vLLM takes blocks back while the LMCache server may still read them: what it stores may be wrong KV.",
        shows=(
            Logged(
                "A store did not finish within <seconds>s; its KV blocks may be overwritten",
                "lmcache/v1/multiprocess/transfer_context/worker_transfer.py",
            ),
        ),
        releases={"lmcache": ">=0.5.6"},
        sentence="a store took more than {seconds} s",
        cause="Before blocks are freed (a preemption, an end) the worker waits for stores in flight, for the time of "
        "one message (lmcache.mp.mq_timeout), then goes on. What the server reads later is stored under the old key.",
        now="a longer lmcache.mp.mq_timeout in kv_connector_extra_config; empty the server's cache (restart it): what "
        "was stored then cannot be told apart",
        good="a server that keeps up: --max-workers, an L2 that does not hold up L1",
    ),
    Problem(
        code="KVD293",
        name="locked-chunks-cleared",
        severity=Severity.WRONG,
        title="Chunks of the LMCache server were removed while they were locked for a transfer.",
        shows=(
            Logged("L1Manager: force-clearing all <objects> objects", "lmcache/v1/distributed/l1_manager.py"),
            Logged("L1Manager: force-deleting locked key"),
        ),
        releases={"lmcache": ">=0.5"},
        sentence="locked chunks were removed by force",
        cause="Someone cleared the cache with force (HTTP API, reset_prefix_cache with the connector) while requests "
        "loaded or stored. A load that was going on may have read memory of another chunk.",
        now="clear without force, or with vLLM paused and its transfers ended",
        good="the order: pause, clear, resume",
    ),
    Problem(
        code="KVD294",
        name="prefill-gave-up-before-the-pull",
        severity=Severity.SLOW,
        title="Prefill freed a request's KV before decode asked for it (Mooncake).",
        shows=(
            Logged("Request <request> expired before sending on P side.", _V1 + "mooncake/mooncake_connector.py"),
            Logged("expired before sending on P side"),
        ),
        connectors=("MooncakeConnector", "MultiConnector"),
        sentence="its KV was freed before it was asked for",
        cause="Decode came later than VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s), or never: it was full, had died, or "
        "the router sent the request elsewhere.",
        now="decode's queue (Waiting) and log at that time; VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=900 on prefill if "
        "decode is merely slow",
        good="as much room in decode as prefill produces",
        sure=False,
    ),
    Problem(
        code="KVD297",
        name="offload-memory-not-pinned",
        severity=Severity.SLOW,
        title="Host memory of the CPU tier could not be pinned: copies are several times slower.",
        shows=(
            Logged("the offload region stays pageable"),
            Logged("Pinned memory not available. CPU offload performance may be degraded."),
            Logged("D2H copies will be synchronous"),
        ),
        sentence="copies use memory that is not pinned",
        cause="Registering the memory with CUDA was refused: memlock (`ulimit -l`), more than the driver may pin, "
        "WSL, or no CUDA runtime in this process.",
        now="ulimit -l unlimited (docker run --ulimit memlock=-1); a smaller CPU tier, to see that it is the size",
        good="memlock unlimited in the unit or the container's specification",
    ),
    Problem(
        code="KVD300",
        name="memory-object-freed-again",
        severity=Severity.LEAK,
        title="A memory object of LMCache was freed that was freed before.",
        shows=(
            Logged(
                "Trying to free an invalidated MemoryObj", "lmcache/v1/memory_allocators/tensor_memory_allocator.py"
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="Its reference count reached zero twice. Here it was noticed; had the memory been handed out in between, "
        "another chunk would have lost it.",
        now="KVFIX=check kvfix run -- CMD names the request and the hook of the second release",
        good="see the findings of pins and reference counts; report it with `kvfix-diagnose LOG --issue FILE.md`",
        sure=False,
    ),
    Problem(
        code="KVD270",
        name="grammar-refuses-a-token",
        severity=Severity.WRONG,
        title="A request with structured output has a token that its grammar does not allow: vLLM ended it.",
        shows=(Logged("Unexpected: grammar rejected tokens <tokens> for request", "vllm/v1/core/sched/scheduler.py"),),
        releases={"vllm": ">=0.15"},
        sentence="a token was not allowed by the grammar",
        cause="The mask of the step and the grammar's state differ. It happens with drafts or asynchronous scheduling, "
        "and when the model reads wrong KV; without structured output the same fault is silent.",
        now="the same request without the connector, with the prefix cache off: if it still comes, it is not the KV. "
        "Else --no-async-scheduling, then without --speculative-config",
        good="what that comparison shows; kvfix run --mode check -- CMD sees wrong KV that the connector delivers",
        sure=False,
    ),
    Problem(
        code="KVD1307",
        name="transfer-asked-of-an-engine-without-connector",
        severity=Severity.SLOW,
        title="Requests ask for a KV transfer, and this engine has no KV connector.",
        shows=(Logged("Got kv_transfer_params, but no KVConnector found", "vllm/v1/engine/core.py"),),
        sentence="a request named a transfer; it was computed from its first token",
        cause="A router or proxy of prefill and decode sends requests here, and the engine was started without "
        "--kv-transfer-config, or its own address stands in the router's list where another engine's should. The "
        "answers are right; nothing is transferred, and a decode engine does all prefills.",
        now="--kv-transfer-config on this engine as its peers have it, with the role that the router takes it for; "
        "else take it out of the router's list",
        good="the same: one router's engines all have the connector",
    ),
    Problem(
        code="KVD1791",
        name="thread-outlives-the-end",
        severity=Severity.RISK,
        title="LMCache ends, and one of its threads does not end in time.",
        shows=(
            Logged(
                "Offload server thread did not terminate within timeout.", "lmcache/v1/offload_server/zmq_server.py"
            ),
            Logged(
                "Lookup server thread did not terminate gracefully", "lmcache/v1/lookup_client/lmcache_lookup_client.py"
            ),
            Logged(
                "Storage manager thread did not terminate within 10s timeout.",
                "lmcache/v1/storage_backend/storage_manager.py",
            ),
        ),
        releases={"lmcache": ">=0.3.11"},
        cause="The engine was to end (SIGTERM, or a crash before it). The thread waits in a read that a closed "
        "socket does not wake; LMCache goes on after 5 or 10 seconds. What was to be written to a store then may be "
        "missing there.",
        now="nothing where the engine was to end; else the first ERROR or Traceback before `Starting LMCacheConnector "
        "shutdown` tells why it ended. Kubernetes: terminationGracePeriodSeconds of 60 or more",
        good="harmless in every release (0.5.6 has the same waits)",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/pull/2293",),
    ),
)
