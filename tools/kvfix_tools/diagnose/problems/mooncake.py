"""MooncakeConnector of vLLM: prefill, decode, bootstrap server and router."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_MOONCAKE_CONNECTOR = f"{_V1}/mooncake/mooncake_connector.py"

PROBLEMS = (
    Problem(
        code="KVD501",
        name="mooncake-prefill-not-ready",
        severity=Severity.HANG,
        title="Decode asked prefill for a request that prefill never made ready.",
        shows=(
            Logged("pulling kv_caches for <requests> failed: Timeout waiting for P side ready"),
            Logged("Timeout waiting for P side ready: <requests>", at=_MOONCAKE_CONNECTOR),
        ),
        sentence="requests {requests}",
        releases={"vllm": ">=0.20"},
        replaces=("KVD202", "KVD261", "KVD1065", "KVD1196"),
        cause="Prefill had aborted the request, or never got it or still has it in its queue, "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (480 s) after decode asked: the cause is that long before this line. Up "
        "to vLLM 0.26 decode then keeps the request and its blocks for ever.",
        now="restart decode (frees its blocks); the router sends prefill's request first and aborts on both sides; "
        "--max-num-seqs of prefill larger, or a limit on its queue; `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=120` on both "
        "sides shows it sooner",
        good='vLLM 0.32.0, which reports the failed pull, with `"kv_load_failure_policy": "recompute"` on decode',
        threads=(
            f"{_ISSUES}/50719",
            f"{_ISSUES}/55870",
        ),
    ),
    Problem(
        code="KVD509",
        name="mooncake-not-installed",
        severity=Severity.CRASH,
        title="Mooncake cannot be imported, and MooncakeConnector does not start.",
        shows=(
            Failed(kind="RuntimeError", text="Mooncake is not available", at=_MOONCAKE_CONNECTOR),
            Failed(
                kind="ImportError",
                text="Please install mooncake by following the instructions <page> with MooncakeTransferEngine",
                at=_MOONCAKE_CONNECTOR,
            ),
            Failed(
                kind="ImportError",
                text="Please install mooncake by following the instructions <page> with MooncakeStoreConnector",
            ),
            Logged("Failed to create connector <connector>: Mooncake not available"),
        ),
        cause="mooncake-transfer-engine is missing or its import fails: built for another CUDA, or libibverbs is "
        "missing.",
        now='`python -c "from mooncake.engine import TransferEngine"` shows why; `pip install '
        "mooncake-transfer-engine` (CUDA 13: mooncake-transfer-engine-cuda13; without CUDA: -non-cuda), "
        "`apt-get install libibverbs1`",
        good="an image with mooncake for its CUDA",
    ),
    Problem(
        code="KVD510",
        name="mooncake-bootstrap-unreachable",
        severity=Severity.HANG,
        title="Decode cannot reach prefill's Mooncake bootstrap server.",
        shows=(
            Logged("Failed to connect to bootstrap server <server>: <reason>"),
            Logged("Failed to connect to bootstrap server <server> (<reason>)", at=_MOONCAKE_CONNECTOR),
        ),
        sentence="{server}: {reason}",
        releases={"vllm": ">=0.20"},
        cause="Prefill is down or not up yet, its VLLM_MOONCAKE_BOOTSTRAP_PORT (8998) is closed, or the router hands "
        "out an address that decode cannot reach. Up to vLLM 0.26 the requests that wait for it never end.",
        now="`curl http://PREFILL:8998/query` from decode; `remote_bootstrap_addr` of the router = prefill's address "
        "and VLLM_MOONCAKE_BOOTSTRAP_PORT; start prefill first; restart decode (frees the requests)",
        good="vLLM 0.32.0 (tries again and reports the failed load), and a reachable bootstrap server",
        threads=(f"{_ISSUES}/55870",),
    ),
    Problem(
        code="KVD511",
        name="mooncake-engine-unknown-to-bootstrap",
        severity=Severity.HANG,
        title="Prefill's bootstrap server does not know the engine that the request names.",
        shows=(Logged("Failed to find remote engine_id <engine> from bootstrap server <server>"),),
        sentence="engine {engine} at {server}",
        cause="The prefill engine was restarted with a new id, or the router pairs the id of one prefill with the "
        "bootstrap address of another.",
        now="restart the router (it keeps old ids) and decode; one `remote_bootstrap_addr` for each prefill engine",
        good="a router that takes engine id and bootstrap address from the same prefill",
    ),
    Problem(
        code="KVD512",
        name="mooncake-not-registered-at-bootstrap",
        severity=Severity.CRASH,
        title="A prefill worker cannot register at the Mooncake bootstrap server.",
        shows=(
            Logged("Error registering <payload> with bootstrap server:", at=_MOONCAKE_CONNECTOR),
            Failed(kind="RuntimeError", text="Failed to register <payload> with the Mooncake bootstrap server at"),
        ),
        sentence="{payload}",
        releases={"vllm": ">=0.20"},
        sure=False,
        cause="The bootstrap server runs in the first worker of prefill's first node. It is not up, its port "
        "VLLM_MOONCAKE_BOOTSTRAP_PORT (8998) is taken by another engine of the host (`Engine ID mismatch`, `is "
        "already registered at`: that engine answers), or an HTTP proxy stands between. Nothing behind `bootstrap "
        "server:` is a timeout: before vLLM 0.32 a worker waits 5 seconds and does not ask again, while the first one "
        "registers memory (a large segment of a Mooncake store beside it) and answers late; the start then hangs.",
        now="nothing behind the colon: vLLM 0.32, or until then a smaller global_segment_size of the store beside it; "
        "else another `VLLM_MOONCAKE_BOOTSTRAP_PORT` for each prefill engine of a host; `export NO_PROXY=*` (no HTTP "
        "proxy between the nodes); port open between prefill's nodes",
        good="one port for each prefill engine; vLLM 0.32.0 or newer waits 30 seconds and asks again "
        "(VLLM_MOONCAKE_CONNECTOR_TIMEOUT)",
        threads=(f"{_ISSUES}/55729", f"{_ISSUES}/55114"),
    ),
    Problem(
        code="KVD716",
        name="mooncake-listener-not-ready",
        severity=Severity.CRASH,
        title="Prefill's Mooncake listener or bootstrap server does not come up, and vLLM does not start.",
        shows=(
            Failed(kind="RuntimeError", text="Mooncake sender listener exited before becoming ready."),
            Failed(kind="RuntimeError", text="Mooncake sender listener did not become ready within <seconds>s."),
            Failed(kind="RuntimeError", text="Mooncake bootstrap server exited during startup"),
            Failed(kind="TimeoutError", text="Mooncake bootstrap server did not start in time"),
        ),
        releases={"vllm": ">=0.32"},
        cause="The listener is ready when its worker has registered at the bootstrap server. That server is not up, "
        "or is not reachable from here: its port is closed or taken, an HTTP proxy stands between, or the first "
        "worker of prefill has failed, in its own log.",
        now="`curl http://PREFILL:8998/query` from this node; another VLLM_MOONCAKE_BOOTSTRAP_PORT for each prefill "
        "engine of a host; export NO_PROXY=*",
        good="the set-up: one open port for each prefill engine",
        sure=False,
    ),
    Problem(
        code="KVD513",
        name="mooncake-router-sends-no-id",
        severity=Severity.SLOW,
        title="The router sends no transfer_id, so prefill keeps no blocks for decode.",
        shows=(Logged("Missing transfer_id in kv_transfer_params from router!", at=_MOONCAKE_CONNECTOR),),
        releases={"vllm": ">=0.20"},
        cause="vLLM's MooncakeConnector pairs the two halves of a request by `transfer_id` of kv_transfer_params; a "
        "router for NixlConnector or for an older vLLM sends none.",
        now="use a router for MooncakeConnector: the same `transfer_id` in both requests, and `remote_engine_id` and "
        "`remote_bootstrap_addr` in decode's (vLLM's example mooncake_connector_proxy.py)",
        good="a router that fits this vLLM release",
    ),
    Problem(
        code="KVD514",
        name="mooncake-blocks-timed-out",
        severity=Severity.RISK,
        title="Prefill gave up KV blocks that decode did not ask for in time.",
        shows=(
            Logged(
                "Request <request> timed out after <seconds> seconds without being sent. Freeing its blocks",
                at=_MOONCAKE_CONNECTOR,
            ),
            Logged(
                "Request <request> timed out after <seconds> seconds without being sent. Freeing its blocks",
                at=f"{_V1}/mooncake_connector.py",
            ),
        ),
        sentence="request {request} after {seconds} s",
        sure=False,
        cause="Decode never asked: it is down or overloaded, the router lost the second half of the request, or the "
        "client had gone (then it is harmless).",
        now="look at decode's log and the router's of that time; `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT` (480 s) on "
        "both sides alike",
        good="a router that aborts on both sides",
        threads=(f"{_ISSUES}/55870",),
    ),
    Problem(
        code="KVD515",
        name="mooncake-blocks-do-not-fit",
        severity=Severity.HANG,
        title="Prefill has fewer KV blocks or other KV groups than decode asks for.",
        shows=(
            Logged("KV group count mismatch: local=<local>, remote=<remote>", at=_MOONCAKE_CONNECTOR),
            Logged(": local blocks(<local>) < remote blocks(<remote>)", at=_MOONCAKE_CONNECTOR),
        ),
        sentence="prefill {local}, decode {remote}",
        releases={"vllm": ">=0.20"},
        cause="Prefill and decode are started differently: a draft model (MTP, EAGLE) on one side only, another "
        "--block-size, the hybrid KV cache manager on one side only; or prefill computed another prompt.",
        now="the same --speculative-config, --block-size, --kv-cache-dtype and hybrid manager flag on both sides",
        good="one set of options for prefill and decode",
    ),
    Problem(
        code="KVD681",
        name="mooncake-role-of-the-other-side",
        severity=Severity.CRASH,
        title="The router sent an engine of MooncakeConnector the half of a request that is the other side's.",
        shows=(
            Failed(kind="AssertionError", source="assert not self.is_kv_producer", at=_MOONCAKE_CONNECTOR),
            Failed(kind="AssertionError", source="assert not self.is_kv_consumer", at=_MOONCAKE_CONNECTOR),
        ),
        releases={"vllm": ">=0.20"},
        cause="`is_kv_producer`: a request with do_remote_prefill reached an engine with kv_role `kv_producer`; "
        "`is_kv_consumer`: one with do_remote_decode reached a `kv_consumer`. EngineCore dies of it.",
        now="compare the router's lists of prefill and decode addresses with `kv_role` of each engine (prefill "
        '`kv_producer`, decode `kv_consumer`); for engines that do both `"kv_role": "kv_both"`; restart the dead one',
        good="a router whose lists fit; no release answers such a request with an error",
    ),
    Problem(
        code="KVD682",
        name="mooncake-regions-differ",
        severity=Severity.HANG,
        title="The KV caches of prefill and decode do not fit each other, and MooncakeConnector refuses.",
        shows=(
            Logged("Mooncake asymmetric TP requires matching KV region counts", at=_MOONCAKE_CONNECTOR),
            Logged("Mooncake KV region length mismatch for homogeneous TP at region", at=_MOONCAKE_CONNECTOR),
            Logged("KV region length does not match the producer TP ratio at region", at=_MOONCAKE_CONNECTOR),
            Logged("KV region length does not match the consumer TP ratio at region", at=_MOONCAKE_CONNECTOR),
            # From 0.26 on they are compared by the names of the layers.
            Logged("Mooncake producer registered layer has no matching consumer occurrence"),
            Logged("Mooncake registered layer index mismatch for"),
            Logged("Mooncake registered group index mismatch for"),
            Logged("transfer region exceeds"),
            Logged("is not paired with P tp_rank", at=_MOONCAKE_CONNECTOR),
            Failed(kind="AssertionError", text="transfer region exceeds", at=_MOONCAKE_CONNECTOR),
            Failed(kind="AssertionError", text="Mooncake transfer regions require matching metadata lengths"),
            Logged("so they cannot be aligned across PP sizes"),
        ),
        releases={"vllm": ">=0.20"},
        cause="Prefill compares its layers with what decode says of its own: another number of layers (a draft model "
        "on one side), other bytes in a block (--block-size, --kv-cache-dtype, attention backend), another model, or "
        "parallel sizes that do not divide (`not paired with`: also a router that names the wrong engine).",
        now="the same model, --speculative-config, --block-size, --kv-cache-dtype and --attention-backend on both "
        "sides; restart both",
        good="one set of options for prefill and decode",
    ),
    Problem(
        code="KVD516",
        name="mooncake-no-pipeline-parallel",
        severity=Severity.CRASH,
        title="This vLLM's MooncakeConnector has no pipeline parallelism.",
        shows=(
            Failed(
                kind="ValueError",
                text="Mooncake Transfer Engine does not support pipeline parallelism yet",
                at=_MOONCAKE_CONNECTOR,
            ),
        ),
        releases={"vllm": ">=0.20,<0.26"},
        cause="Its workers are found by tensor parallel rank alone.",
        now="`--pipeline-parallel-size 1` with more --tensor-parallel-size",
        fixed={"vllm": "0.26.0"},
    ),
    Problem(
        code="KVD547",
        name="mooncake-store-of-v0",
        severity=Severity.CRASH,
        title="The MooncakeStoreConnector of vLLM's V0 engine hands a kernel flat KV that it no longer takes.",
        shows=(
            Failed(
                kind="IndexError",
                text="Dimension out of range (expected to be in range of [-2, 1], but got 2)",
                within="mooncake_store_connector.py:recv_kv_caches_and_hidden_states",
            ),
        ),
        releases={"vllm": "<0.11"},
        cause="reshape_and_cache was changed for tensors of three dimensions (vLLM 0.8.5), and the connectors of V0 "
        "pass two. V0 was removed with vLLM 0.11, and they were never changed.",
        now="LMCacheConnectorV1 with remote_url: mooncakestore://HOST:50051/ on the V1 engine",
        good="vLLM 0.26.0 or newer: MooncakeConnector (P/D) or MooncakeStoreConnector (pool) of the V1 engine",
        threads=(
            "https://github.com/vllm-project/vllm/issues/18834",
            "https://github.com/kvcache-ai/Mooncake/issues/504",
        ),
    ),
    Problem(
        code="KVD548",
        name="mooncake-store-of-v0-missed",
        severity=Severity.SLOW,
        title="Decode did not find all of a prompt's KV in the Mooncake store, and computes the prompt itself.",
        shows=(Logged("Failed to receive all KVs and hidden states, redo model forwarding."),),
        releases={"vllm": "<0.11"},
        sure=False,
        cause="V0's MooncakeStoreConnector takes a prompt whole or not at all. Known: chunked prefill on the prefill "
        "instance, which it cannot store; a store that is full or has evicted it; decode that asked too early. "
        "Mooncake's own lines (get failed, no available handle) say which.",
        now="--enable-chunked-prefill=False on prefill, a larger global_segment_size in the file of "
        "MOONCAKE_CONFIG_PATH",
        good="vLLM 0.26.0 or newer: MooncakeConnector (P/D) or MooncakeStoreConnector (pool) of the V1 engine",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/269",),
    ),
)
