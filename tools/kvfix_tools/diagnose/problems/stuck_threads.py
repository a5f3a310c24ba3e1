"""Where threads of LMCache stand that wait without a limit, in a stack of py-spy's."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Problem, Stuck

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD1082",
        name="stuck-in-allocation",
        severity=Severity.HANG,
        title="A load waits for room in LMCache's CPU pool, and there is nothing that it could evict.",
        shows=(Stuck("local_cpu_backend.py:allocate"), Stuck("local_cpu_backend.py:batched_allocate")),
        replaces=("KVD213",),
        sure=False,
        cause="Loads ask again and again until other requests free memory, without a limit in any release (0.5.6). "
        "Nothing comes free where all chunks are pinned (a leak, or one request larger than the pool), or with "
        "local_cpu: false, where nothing is kept that could be evicted. Three stacks that are the same prove it.",
        now="restart vLLM with max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE, GB for each worker) above the KV of all "
        "prompts that load at once, and local_cpu: true; until then enable_async_loading: false and fewer requests at "
        "once (--max-num-seqs)",
        good="that size; no release gives up (LMCache issue 2942)",
        threads=(_LMCACHE + "issues/2942",),
    ),
    Problem(
        code="KVD1084",
        name="stuck-in-remote-lookup",
        severity=Severity.HANG,
        title="The engine waits for its remote store to say whether it has a chunk.",
        shows=(Stuck("remote_backend.py:contains"), Stuck("remote_backend.py:batched_contains")),
        replaces=("KVD213",),
        sure=False,
        cause="A lookup asks the store and waits for the answer without a time limit (0.5.6 and before): a store that "
        "hangs, or packets that a firewall drops in an open connection, stop the scheduler, and with it every "
        "request. Three stacks that are the same prove it.",
        now="`redis-cli -u REMOTE_URL ping` (others: nc -vz HOST PORT) from the worker's container; restart the store, "
        "then vLLM; until it is right without remote_url (unset LMCACHE_REMOTE_URL). "
        "redis://HOST:6379?socket_timeout=5 gives Redis a limit",
        good="a limit in the URL (Redis), or `lmcache server` with LMCacheMPConnector, whose lookups have one",
    ),
    Problem(
        code="KVD1086",
        name="stuck-in-peer-fetch",
        severity=Severity.HANG,
        title="Two engines ask each other for KV at the same time, and both wait.",
        shows=(Stuck("naive_server.py:issue_get"),),
        replaces=("KVD213",),
        cause="LMCache's first peer-to-peer sharing (distributed_url, lookup_url) answers and asks in one loop: while "
        "it waits for the peer it serves no one else.",
        now="restart both engines; enable_p2p: false, or clients of one prefix to one engine",
        good="LMCache 0.3.9 or newer, whose P2P (enable_p2p with a controller and transfer_channel: nixl) is another",
        threads=(_LMCACHE + "issues/1258",),
    ),
    Problem(
        code="KVD1120",
        name="stuck-behind-one-server",
        severity=Severity.HANG,
        title="The thread that sends to all LMCache servers is stuck, and whoever makes or closes a client waits.",
        shows=(Stuck("mq.py:unregister"), Stuck("mq.py:register")),
        connectors=("LMCacheMPConnector", "MultiConnector"),
        releases={"lmcache": ">=0.5.0"},
        replaces=("KVD213",),
        cause="All clients of a process share one polling thread (ClientPollingLoop). It sends without a limit of "
        "time, so one server that is unreachable, with its queue full, holds it: requests to healthy servers are not "
        "sent either, and a shutdown waits for it without an end.",
        now="bring the server back that does not answer (nc -vz HOST 5555 from the worker's container); a worker that "
        "hangs in its shutdown needs kill -9",
        good="no release of LMCache limits that send yet (0.5.6): one server for a process, on the same node",
        threads=("https://github.com/local-inference-lab/rtx6kpro/issues/48",),
    ),
)
