"""MoRIIOConnector of vLLM, for AMD GPUs: transfers that fail, are given up, or do not fit."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_MORIIO = "vllm/distributed/kv_transfer/kv_connector/v1/moriio"
_CONNECTOR = f"{_MORIIO}/moriio_connector.py"
_ENGINE = f"{_MORIIO}/moriio_engine.py"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_MORI = "https://github.com/ROCm/mori/issues"

PROBLEMS = (
    Problem(
        code="KVD672",
        name="moriio-write-worker-died",
        severity=Severity.HANG,
        title="One failed transfer ended the thread with which MoRIIOConnector sends KV, and decode waits for ever.",
        shows=(Failed(kind="TransferError", text="MoRIIO transfer failed!", at=_ENGINE),),
        releases={"vllm": "<0.26"},
        cause="RDMA could not write the KV of a request (`Transfer failed: ..., Code: ...` before it says why). "
        "Nothing catches that in the thread moriio-write-worker: it ends, and no later request of this rank is sent.",
        now="restart prefill; if it comes with load: fewer requests at a time (--max-num-seqs on prefill), for these "
        "releases do not wait for a full send queue of the NIC",
        fixed={"vllm": "0.26.0"},
        threads=(f"{_PULLS}/40344",),
    ),
    Problem(
        code="KVD673",
        name="moriio-transfer-failed",
        severity=Severity.HANG,
        title="RDMA could not move the KV of a request between the engines of MoRIIOConnector.",
        shows=(
            Logged("RDMA transfer failed for request <request>: <reason> (code=<code>)", at=_CONNECTOR),
            Failed(kind="TransferError", text="transfers failed:", at=_ENGINE),
            Failed(kind="TransferError", text="MoRIIO batch wait failed"),
            # 0.32: the forward goes on.
            Logged("MoRIIO reads did not complete before the forward; proceeding to transfer cleanup"),
        ),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="The reason in the line decides: `timed out` is the NIC's queue or a link that lost an answer, `SQ full` "
        "too many transfers at a time (KVD677), anything else the link or the peer. In WRITE mode decode does not "
        "learn of it, and the request waits there; in READ mode only vLLM 0.32 and later can compute it again, and not "
        "for hybrid models.",
        now='`"kv_connector_extra_config": {"qp_per_transfer": 4, "transfer_timeout": 120}` on both sides; fewer '
        'requests at a time; `"kv_load_failure_policy": "recompute"` on decode (READ mode, vLLM 0.32); restart the '
        "engine whose requests stay",
        good="a lossless RDMA network; mori issue 655 is open: one lost answer ends a connection for good",
        threads=(f"{_MORI}/655", f"{_ISSUES}/45749", f"{_PULLS}/47495"),
    ),
    Problem(
        code="KVD674",
        name="moriio-read-timed-out",
        severity=Severity.HANG,
        title="A read of MoRIIOConnector never came to an end, and decode gave it up.",
        shows=(Logged("RDMA read TIMED OUT for req <request> after <seconds>s", at=_CONNECTOR),),
        sentence="request {request}, after {seconds} s",
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="No completion, good or bad, in `recv_abort_timeout`: prefill went away, or the NIC lost the "
        "completion. The blocks are reported as not loaded (not for hybrid models). Prefill does not learn of it: it "
        "holds its blocks until `defer_timeout`.",
        now='look at prefill\'s log of that time; `"kv_load_failure_policy": "recompute"` on decode, so that it '
        "computes what did not come; restart the engine whose connection is broken",
        good="a lossless RDMA network",
        threads=(f"{_MORI}/655", f"{_ISSUES}/45749"),
    ),
    Problem(
        code="KVD675",
        name="moriio-decode-never-asked",
        severity=Severity.HANG,
        title="Prefill has the KV of a request, and decode never said where to write it.",
        # "expired after" up to 0.32, "timed out after" in 0.33.
        shows=(Logged("Deferred write task for request <request>", at=_ENGINE),),
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="WRITE mode: decode sends its blocks to prefill's notify port when it has room for the request. In "
        "`defer_timeout` (60 s) that did not come: decode is full or down, never got the request, or named another "
        "rank or port (KVD667). Before 0.33 prefill gives up without a word, and decode waits if it asks later.",
        now='`"kv_connector_extra_config": {"defer_timeout": 300}` on prefill if decode has a queue (its `Waiting:`); '
        "else see whether decode got the request, and whether it can reach prefill's notify_port (and the ports after "
        "it, one for each rank)",
        good="decode fast enough for what prefill sends, and vLLM 0.33.0, where prefill says so to decode",
        threads=(f"{_PULLS}/40344",),
    ),
    Problem(
        code="KVD676",
        name="moriio-sends-given-up",
        severity=Severity.RISK,
        title="Prefill of MoRIIOConnector freed KV blocks of which decode has not said that it has them.",
        shows=(Logged("Reaped <count> deferred sends with no finished_sending notification", at=_CONNECTOR),),
        sentence="{count} requests",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Nothing came from decode in `defer_timeout` (60 s after the prefill): decode is down, overloaded or "
        "never got the requests, its message was lost, or the clients had gone (then it is harmless). A decode that "
        "reads the blocks later reads another request's KV.",
        now='look at decode\'s log of that time; `"kv_connector_extra_config": {"defer_timeout": 300}` on prefill, '
        "longer than the longest wait on decode",
        good="decode fast enough for what prefill sends; a router that aborts on both sides",
        threads=(f"{_PULLS}/40344", f"{_ISSUES}/45749"),
    ),
    Problem(
        code="KVD677",
        name="moriio-send-queue-full",
        severity=Severity.HANG,
        title="The NIC's send queue stayed full, and MoRIIOConnector gave up reading the KV of a request.",
        shows=(
            Logged(
                "MoRIIO READ send queue stayed full past transfer_timeout for req <request> layer <layer>",
                at=_CONNECTOR,
            ),
        ),
        sentence="request {request}, layer {layer}",
        releases={"vllm": ">=0.26"},
        cause="More reads are posted than the queue pairs take, for longer than `transfer_timeout` (30 s): too many "
        "requests at a time, or a connection that is dead and no longer empties its queue.",
        now='`"kv_connector_extra_config": {"qp_per_transfer": 4}` on both sides (default 1), fewer requests at a time '
        "(--max-num-seqs on decode); if it goes on without load: restart decode",
        good="queue pairs for the load: qp_per_transfer",
        threads=(f"{_PULLS}/47495",),
    ),
    Problem(
        code="KVD678",
        name="moriio-fewer-remote-blocks",
        severity=Severity.CRASH,
        title="Decode of MoRIIOConnector expects more KV blocks than prefill has for the request.",
        shows=(
            # Up to 0.26, then from 0.32 on.
            Failed(
                kind="AssertionError",
                within="moriio_connector.py:update_state_after_alloc",
                source="assert len(local_block_ids) <= len(remote_block_ids)",
            ),
            Failed(kind="ValueError", text="decode block ids exceed prefill block ids beyond the allowed local tail"),
        ),
        cause="Decode allocated blocks that prefill never had: speculative decoding on decode (its draft tokens take a "
        "block more; vLLM 0.32 allows for it), another block size, or another prompt than prefill computed.",
        now="the same --speculative-config, --block-size and chat template on both sides; without speculative decoding "
        "before vLLM 0.32; a router that hands decode the very prompt of prefill",
        good="vLLM 0.32.0, and one set of options for prefill and decode",
    ),
    Problem(
        code="KVD679",
        name="moriio-mamba-state-layout",
        severity=Severity.CRASH,
        title="MoRIIOConnector needs another layout of the Mamba state.",
        shows=(Failed(kind="MoRIIOError", text="set VLLM_SSM_CONV_STATE_LAYOUT=DS", at=_CONNECTOR),),
        releases={"vllm": ">=0.32"},
        cause="It can send the convolution state of hybrid models only where the dimension comes before the state; the "
        "default is the other way round.",
        now="`export VLLM_SSM_CONV_STATE_LAYOUT=DS` on prefill and decode, restart both",
        good="the same; no release changes that",
        threads=(f"{_PULLS}/51052",),
    ),
    Problem(
        code="KVD680",
        name="moriio-block-size",
        severity=Severity.CRASH,
        title="The attention backend lays out the KV cache in other blocks than --block-size says, and MoRIIOConnector "
        "cannot register it.",
        shows=(
            Failed(
                kind="AssertionError",
                within="moriio_connector.py:register_kv_caches",
                source="assert block_size == self.block_size",
                at=_CONNECTOR,
            ),
        ),
        releases={"vllm": "<0.26"},
        cause="The connector takes one dimension of the cache (the second from its end with MLA, else the third) for "
        "the block. The backend has something else there: smaller blocks of its kernel, or the KV heads.",
        now="`--block-size` as the backend's kernel has it (16 or 64), or another --attention-backend; "
        "VLLM_KV_CACHE_LAYOUT=NHD for a backend that puts the heads first",
        good="vLLM 0.26.0 for models without MLA: it works out the layout; with MLA such a --block-size",
    ),
    Problem(
        code="KVD1186",
        name="moriio-notification-not-sent",
        severity=Severity.HANG,
        title="A worker of MoRIIOConnector could not tell the other engine that KV was read or written.",
        shows=(Logged("Failed to send notification to <peer>: <error>", at=_ENGINE),),
        sentence="to {peer}: {error}",
        sure=False,
        cause="The other engine is gone, or its notify_port plus rank is not reachable. In READ mode prefill keeps the "
        "blocks, in WRITE mode decode waits for KV that is there.",
        now="`nc -vz HOST PORT` with the address of the line; restart the engine that went away, then this one; "
        "notify_port of engines of a host further apart than their number of ranks",
        good="addresses and ports that both engines reach",
    ),
    Problem(
        code="KVD1188",
        name="moriio-loses-its-proxy",
        severity=Severity.HANG,
        title="MoRIIOConnector no longer announces this engine to the proxy.",
        shows=(
            Logged("Max retries (<many>) exceeded. Stopping ping loop.", at=_CONNECTOR),
            Failed(kind="RuntimeError", text="Ping failed after <many> retries", at=_CONNECTOR),
        ),
        sentence="after {many} pings that failed",
        releases={"vllm": "<0.32"},
        cause="The proxy at proxy_ip:proxy_ping_port was not there for so long: started late, restarted, or behind a "
        "firewall. Only the thread ends; the engine looks healthy, and a proxy that comes later never hears of it.",
        now="start the proxy first, then restart this engine; `nc -vz PROXY_IP PROXY_PING_PORT` from here",
        good="a proxy that is up before the engines and stays",
    ),
    Problem(
        code="KVD1190",
        name="moriio-transfer-id-unknown",
        severity=Severity.HANG,
        title="MoRIIOConnector ends a request whose transfer it does not know.",
        shows=(
            Logged("Could not find <request>  in transfer_id_to_request_idlookup table", at=_CONNECTOR),
            Logged("transfer id not in transfer_id_to_request_id lookuptable", at=_CONNECTOR),
        ),
        releases={"vllm": ">=0.20,<0.32"},
        sure=False,
        cause="The request was aborted or ended twice, or came through a proxy that gives no transfer_id. Its blocks "
        "may "
        "stay held, and the other engine may wait.",
        now="the proxy example of this vLLM release; restart the engines if requests wait",
        good="a proxy and an engine of one release; vLLM 0.32.0 has another table for it",
    ),
)
