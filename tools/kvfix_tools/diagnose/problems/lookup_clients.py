"""The scheduler's lookup client of LMCache in the engine's own process."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

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
    Problem(
        code="KVD438",
        name="socket-path-too-long",
        severity=Severity.CRASH,
        title="The path of LMCache's socket is longer than Linux allows, and it does not start.",
        shows=(
            Failed(kind="ZMQError", text="is longer than 107 characters"),
            Failed(kind="ZMQError", text="File name too long", within="lmcache/"),
            Failed(
                kind="ValueError",
                text="Cannot construct an IPC socket path within the <limit>-byte sockaddr_un limit",
            ),
        ),
        sentence="the folder of temporary files has too long a name",
        cause="LMCache puts its sockets into VLLM_RPC_BASE_PATH, which is TMPDIR unless set, and their names hold the "
        "engine's id: some 78 characters. A Unix socket's path may have 107, so a folder of more than 29 "
        "characters is too long. From 0.5.4 on LMCache shortens the name; then only the folder counts.",
        now="export VLLM_RPC_BASE_PATH=/tmp (or TMPDIR=/tmp) before vllm serve, and restart",
        fixed={"lmcache": "0.5.4"},
        threads=("https://github.com/LMCache/LMCache/issues/3529", "https://github.com/LMCache/LMCache/pull/3530"),
    ),
    Problem(
        code="KVD377",
        name="lookup-server-does-not-answer",
        severity=Severity.HANG,
        title="The scheduler's lookups get no answer from a worker: each waits, and nothing is found.",
        shows=(
            Logged("Failed to receive from rank <rank> after <count> retries"),
            Logged("Receive timeout (retry <count>/<most>) for rank <rank>"),
        ),
        sure=False,
        cause="The worker of this rank has no lookup server (LMCache did not start there: its first ERROR says why), "
        "is busy with stores, or listens at another socket: lmcache_rpc_port in kv_connector_extra_config, or /tmp "
        "that the processes do not share.",
        now="the first LMCache WARNING or ERROR of that worker; ls -l /tmp/engine_*lookup* in the container; one "
        "lmcache_rpc_port for each engine on a machine; restart vLLM",
        good="LMCache 0.3.9 or newer, which names the socket and gives up after lookup_timeout_ms",
        threads=("https://github.com/LMCache/LMCache/pull/1615",),
    ),
    Problem(
        code="KVD268",
        name="lookup-cannot-be-read",
        severity=Severity.SLOW,
        title="A rank could not answer a lookup: the request counts as a miss, or waits for the time of a lookup.",
        shows=(
            Logged(
                "Error decoding JSON in lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"
            ),
            Logged(
                "Error decoding UTF-8 in lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"
            ),
            Logged("Error processing lookup request: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"),
            Logged(
                "Error processing response from worker: <error>",
                "lmcache/v1/lookup_client/lmcache_async_lookup_client.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        quotes=True,
        sentence="{error}",
        cause="The rank's LMCache raised while it looked the keys up; the error names why. Scheduler and ranks of two "
        "releases of LMCache, after an update of one pod only, look so too.",
        now="what the error names; the same image for all ranks",
        good="what ends the error",
        sure=False,
    ),
    Problem(
        code="KVD472",
        name="lookup-socket-fails",
        severity=Severity.SLOW,
        title="The scheduler could not ask a worker's LMCache what it has: the lookup counts as a miss.",
        shows=(
            Logged("ZMQ error for rank <rank>: <error>, recreating all sockets"),
            Logged("Error in bypass lookup: <error>"),
        ),
        sentence="{error}",
        sure=False,
        cause="`ZMQ error`: the worker hangs or has died, or its socket file in /tmp was removed; all sockets are "
        "made anew, and answers of other lookups get lost. `bypass lookup` (enable_scheduler_bypass_lookup): the "
        "scheduler asks the remote store itself, and the store failed.",
        now="if it repeats: py-spy dump --pid PID of the worker; the store from the scheduler's container; "
        "extra_config: {lookup_timeout_ms: 10000} where workers are only slow",
        good="what the error names",
    ),
)
