"""Requests that LMCache's server or its client refuses: not registered, of another layout, locks without an owner."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_MP = ("LMCacheMPConnector", "MultiConnector")
_TYPES = "lmcache/v1/multiprocess/custom_types.py"
_TRANSFER = "lmcache/v1/multiprocess/object_group_transfer.py"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`: no release up to 0.5.6 is right"

PROBLEMS = (
    Problem(
        code="KVD1010",
        name="transfer-context-not-registered",
        severity=Severity.CRASH,
        title="A worker wants to transfer KV, and it is not registered with the LMCache server.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="KV caches are not registered. Call register_kv_caches() before creating transfer events.",
            ),
            Failed(kind="RuntimeError", text="transfer context is not registered. Call register() before"),
            Failed(kind="RuntimeError", text="EngineDrivenTransferContext is not registered, call register() first."),
            Failed(kind="RuntimeError", text="Transfer context is closed."),
        ),
        releases={"lmcache": ">=0.4.6"},
        connectors=_MP,
        sure=False,
        cause="The worker registers its KV caches once, at the start (REGISTER_KV_CACHE), and again when the server "
        "has come back. Either failed or timed out before this line, or the engine is just ending (`Transfer context "
        "is closed.`), which is no fault.",
        now="look for the worker's REGISTER line and the server's log at that time; restart the server, then vLLM; "
        "both of one release of LMCache",
        good="a server that is up before the engines, of their release",
    ),
    Problem(
        code="KVD1011",
        name="blocks-are-no-whole-chunks",
        severity=Severity.SLOW,
        title="The server is handed blocks of a KV group that make no whole chunks.",
        shows=(
            Failed(
                kind="AssertionError",
                text="len(block_ids[<group>]) should be a multiple of total_blocks_per_chunk (<blocks>), but got <got>",
            ),
            Failed(kind="AssertionError", source="assert len(old_block_ids) % total_blocks_per_chunk == 0"),
            Failed(kind="AssertionError", within="get_num_new_matched_tokens", source="lmcache_tokens_per_chunk == 0"),
        ),
        releases={"lmcache": ">=0.4.7"},
        sure=False,
        cause="A chunk of this group is total_blocks_per_chunk blocks of it. The client counted its blocks with "
        "another chunk size, or vLLM has given fewer blocks than tokens (a window that slides, blocks of a draft). "
        "TensorRT-LLM hands over the blocks of its unfinished chunk too (issue 3917).",
        now="the server's --chunk-size and the engine's lmcache.chunk_size equal, and a multiple of every group's "
        "block size; without --speculative-config to see whether it is that",
        good=_REPORT,
    ),
    Problem(
        code="KVD1012",
        name="chunk-vanished-before-its-copy",
        severity=Severity.SLOW,
        title="A chunk that the lookup had found and locked is not there when the server copies it to the GPU.",
        shows=(
            Failed(
                kind="ValueError",
                text="MemoryObj is None for some objects in the batch, cannot perform H2D copy.",
            ),
            Failed(kind="ValueError", text="MemoryObj is None for chunk <chunk>, cannot perform H2D copy"),
        ),
        releases={"lmcache": ">=0.4.7"},
        sure=False,
        cause="The read lock of a lookup keeps its chunks until the load, or until --l1-read-ttl-seconds (300 s) have "
        "passed. A request that waited longer in vLLM's queue, a lock that another reader of the same chunk gave back "
        "in its place, or a clear of the cache in between leaves a hole. The load fails, and vLLM computes the prompt.",
        now="--l1-read-ttl-seconds 900 on the server where requests wait long; no clear under load",
        good=_REPORT,
    ),
    Problem(
        code="KVD1013",
        name="load-without-its-lookup",
        severity=Severity.SLOW,
        title="A load comes to the server, and the lookup that it belongs to has ended.",
        shows=(
            Failed(kind="ValueError", text="Multi-L1 retrieve requires a live prefetch session"),
            Failed(kind="ValueError", text="Read requires the exact owner retained by prefetch"),
            Logged(
                "Cannot release RETRIEVE locks for unregistered instance <instance>: request <request> has no lookup"
            ),
        ),
        releases={"lmcache": ">=0.5.5"},
        sure=False,
        cause="The server keeps a session for each request from its lookup to END_SESSION. It was ended by an abort, "
        "by its age, or by a server that was restarted in between; several L1s (DRAM and Device-DAX) need it to know "
        "who holds which chunk.",
        now="restart vLLM after a restart of the server; nothing if the request was aborted just before",
        good=_REPORT,
    ),
    Problem(
        code="KVD1015",
        name="server-answer-without-device-event",
        severity=Severity.SLOW,
        title="The LMCache server did not answer a transfer in time.",
        shows=(Failed(text="DeviceMessagingFuture raw result not available within timeout"),),
        releases={"lmcache": ">=0.5.6"},
        connectors=_MP,
        sure=False,
        cause="The client waits until the server has handed the copy to the GPU. The server's worker threads are all "
        "busy (long copies, an L2 that is slow to answer), it died, or a handler failed before it could answer; the "
        "server's log at this time decides.",
        now="the server's log: a traceback at this second, or `--max-gpu-workers` too few for the number of engines",
        good="a server with a worker thread for each engine and rank",
    ),
    Problem(
        code="KVD1016",
        name="stores-dropped-while-unhealthy",
        severity=Severity.RISK,
        title="Stores are dropped: the client takes the LMCache server for dead.",
        shows=(
            Logged(
                "Dropping store for request <request> while the server is unhealthy; reporting it as completed",
                "lmcache/integration/vllm/vllm_multi_process_adapter.py",
            ),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="The heartbeat had no answer. Until it has one again nothing is stored and nothing found; requests are "
        "computed as without a cache, and no request fails.",
        now="is the server alive (`curl http://SERVER:8080/healthcheck`), and why did it not answer: its log, its "
        "memory, its network; restart it",
        good="a server that is watched and restarted by its own unit",
    ),
    Problem(
        code="KVD1018",
        name="handler-of-another-signature",
        severity=Severity.CRASH,
        title="A handler of the LMCache server does not fit the protocol that it is registered for.",
        shows=(
            Failed(kind="ValueError", text="Handler signature does not match for operation: <operation>"),
            Failed(kind="ValueError", text="Handler signature does not match for request type: <operation>"),
            Failed(kind="ValueError", text="No handler registered for operation: <operation>"),
            Failed(kind="ValueError", text="No handler registered for request type: <operation>"),
            Failed(kind="TypeError", text="payload annotations <own> do not match RPC <operation> types"),
            Logged("Handler for <operation> expects <count> arguments, but got <got>"),
            Logged("Handler for <operation> argument <index> expects type <type>, but got <got>"),
            Logged("Handler for <operation> expects return type <type>, but got <got>"),
        ),
        cause="Server code and protocol of one LMCache are made together. They differ where files of two releases are "
        "mixed: an installation over an older one, a PYTHONPATH with a checkout, an extension of another release.",
        now="pip uninstall -y lmcache until none is left, then install one release",
        good="one LMCache in the server's environment",
    ),
    Problem(
        code="KVD1019",
        name="frame-not-understood",
        severity=Severity.RISK,
        title="The client cannot read a message of the LMCache server, and drops it.",
        shows=(
            Logged("process_inbound failed; dropping this frame and continuing the shared polling loop"),
            Failed(kind="ValueError", text="Unknown legacy ZMQ operation id: <operation>"),
            Failed(kind="TypeError", text="Invalid ZMQ operation identifier: <operation>"),
        ),
        sure=False,
        cause="Client and server are of different releases, so that one does not know the other's messages; the "
        "traceback below names what it could not read. The request that waited for it runs into its timeout.",
        now="pip show lmcache on both sides: the same release; restart both",
        good="one release of LMCache on both sides",
    ),
    Problem(
        code="KVD1600",
        name="salt-that-no-key-takes",
        severity=Severity.CRASH,
        title="One request ends the engine: LMCache's keys do not take its cache_salt.",
        shows=(
            Failed(kind="ValueError", text="cache_salt must not contain <characters> (got <salt>)", at=_TYPES),
            Failed(kind="ValueError", text="cache_salt exceeds max length <limit> (got <size>)", at=_TYPES),
        ),
        sentence="the request's cache_salt is refused in the scheduler",
        connectors=_MP,
        releases={"lmcache": ">=0.4.4"},
        cause="A salt becomes part of the key of each chunk: at most 128 characters, without `@`, `/`, `\\` and NUL. "
        "Base64 has `/`. vLLM before 0.32 takes any text of a client, and the connector raises in the scheduler, which "
        "ends the engine and all its requests; vLLM 0.32 answers that one client with 400.",
        now="let the gateway send salts of hex digits or of URL-safe base64 (python3 -c 'import secrets; "
        "print(secrets.token_hex(32))'), and refuse others there; restart vLLM",
        fixed={"vllm": "0.32"},
    ),
)
