"""NixlConnector: transfers that fail, and leases that end."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"

PROBLEMS = (
    Problem(
        code="KVD570",
        name="nixl-handshake-failed",
        severity=Severity.HANG,
        title="The NIXL handshake of decode with a prefill engine failed.",
        shows=(
            Logged("NIXL transfer failure: handshake_failed"),
            Logged("NIXL transfer failure: handshake_setup_failed"),
            Logged("Handshake failed for request <request>, marking blocks as invalid"),
        ),
        sure=False,
        cause="The exception below that line decides: `zmq.error.Again` no answer came, `engine ID mismatch` another "
        "engine answers, `compatibility hash mismatch` other settings, `NIXL_ERR_BACKEND` (loadRemoteMD) no way for "
        "UCX, or another tensor parallel size than prefill's, an assertion: the two do not fit.",
        now="read the exception below it; start prefill (if it crashed, its own log says why), and set "
        "VLLM_NIXL_SIDE_CHANNEL_HOST there to the address that decode can reach; "
        '`"kv_load_failure_policy": "recompute"` on decode (vLLM 0.15 or later) answers requests meanwhile; '
        "`NIXL_ERR_BACKEND` with two sizes: the same --tensor-parallel-size on both",
        good="the set-up that the exception names; before vLLM 0.26.0 a failed handshake may also kill decode (KVD576)",
        threads=(
            f"{_PULLS}/26171",
            f"{_PULLS}/40364",
            "https://github.com/vllm-project/vllm/issues/50765",
        ),
    ),
    Problem(
        code="KVD571",
        name="nixl-transfer-failed",
        severity=Severity.HANG,
        title="NIXL could not fetch the KV of a request.",
        shows=(
            Logged("NIXL transfer failure: transfer_failed"),
            Logged("NIXL transfer failure: transfer_exception"),
            Logged("NIXL transfer failure: transfer_setup_failed"),
            Logged("NIXL transfer failed for request <request> with state <state>"),
            Logged("NIXL transfer setup/initiation failed for request <request>"),
            Failed(
                kind="nixlBackendError",
                text="NIXL_ERR_BACKEND",
                within="_api.py:transfer",
                through="kv_connector/v1/nixl",
            ),
        ),
        sure=False,
        cause="Prefill went away or freed the blocks, or the link broke. The exception below decides: "
        "REMOTE_DISCONNECT or NOT_FOUND: the peer is gone (KVD572, KVD591); BACKEND: UCX or the NIC, see `UCX  ERROR` "
        "before it.",
        now='`"kv_load_failure_policy": "recompute"` on decode, so that it computes what did not come; restart '
        "the engine whose log ends first",
        good="a stable link; with hybrid models (several KV groups) a failed transfer is not recomputed rightly in any "
        "release yet: use `fail` there",
        threads=(
            f"{_ISSUES}/52234",
            "https://github.com/ai-dynamo/nixl/issues/1614",
        ),
    ),
    Problem(
        code="KVD572",
        name="nixl-peer-lost",
        severity=Severity.HANG,
        title="NIXL lost the connection to the other engine, and no later transfer with it works.",
        shows=(
            Failed(kind="nixlRemoteDisconnectError", within="_pop_done_transfers"),
            Failed(kind="nixlRemoteDisconnectError", within="_read_blocks"),
            Failed(kind="nixlRemoteDisconnectError", within="_start_load_kv"),
            Failed(kind="nixlRemoteDisconnectError", within="get_finished"),
            Failed(kind="nixlNotFoundError", within="_read_blocks"),
            Failed(kind="nixlNotFoundError", within="_pop_done_transfers"),
            Failed(kind="RuntimeError", text="BAD_STATUS"),  # of NIXL's binding, and of nothing else
        ),
        releases={"vllm": "<0.32"},
        replaces=("KVD571",),
        cause="The peer died or restarted, or UCX gave the connection up (seen after days of uptime). NIXL then "
        "forgets the peer, and vLLM does no new handshake with an engine that it knows already. Before 0.15 the worker "
        "dies of it.",
        now='restart the engine whose peer was lost (both for a fixed pair); `"kv_load_failure_policy": '
        '"recompute"` on decode until then',
        fixed={"vllm": "0.32.0"},
        threads=(
            "https://github.com/wtdcode/vllm-backport/issues/33",
            f"{_PULLS}/28120",
        ),
    ),
    Problem(
        code="KVD591",
        name="nixl-peer-gone",
        severity=Severity.HANG,
        title="The other engine went away while its KV was to be read.",
        shows=(
            Failed(kind="nixlRemoteDisconnectError", within="_pop_done_transfers"),
            Failed(kind="nixlRemoteDisconnectError", within="_read_blocks"),
            Failed(kind="nixlRemoteDisconnectError", within="get_finished"),
        ),
        releases={"vllm": ">=0.32"},
        replaces=("KVD571", "KVD303"),
        cause="Prefill died, was restarted or was cut off: UCX closed the connection. The requests whose KV "
        "it held end with an error (`kv_load_failure_policy` `fail`, the default) or are computed again "
        "(`recompute`). Decode goes on, and connects anew to a prefill that is started again.",
        now='start prefill again; the end of its log says why it went. `"kv_load_failure_policy": "recompute"` on '
        "decode keeps such requests",
        good="a prefill that stays, and a router that sends nothing to one that is gone",
    ),
    Problem(
        code="KVD573",
        name="nixl-read-after-expiry",
        severity=Severity.WRONG,
        title="Decode read KV blocks that prefill had given up: the answer may be computed from another request's KV.",
        shows=(
            Logged(
                "Potentially invalid KV blocks for unrecognized request <request> were retrieved by",
                at=f"{_V1}/nixl/pull_worker.py",
            ),
            # Its end stands in the next line where it was wrapped by hand.
            Logged("Potentially invalid KV blocks for unrecognized request", at=f"{_V1}/nixl/pull_worker.py"),
            Logged("Unrecognized request <request> notif (may have expired)", at=f"{_V1}/nixl/push_worker.py"),
        ),
        sure=False,
        cause="With `Releasing expired KV blocks` for the same id before it: the lease ended, the blocks were given "
        "away, and decode read them after that, HTTP 200. Without it: a second decode request had the same "
        "kv_transfer_params (a router or client that tries again), and read blocks that the first read had set free; "
        "or prefill was restarted, or the request was aborted there. Ids `0_...` and `1_...`: a request with n > 1, of "
        "which the router hands on one (Dynamo). vLLM before 0.11.2 with --async-scheduling: prefill's worker "
        "hears of the request a step after decode has read it; that KV is right, but its blocks wait for the time-out. "
        "Where every request logs it and another id with the same start expires later: KVD575 (vllm#36958), and the "
        "KV is right. vLLM only logs it.",
        now='distrust the answers of these ids. vLLM 0.26 or later: `"kv_connector_extra_config": '
        '{"kv_lease_duration": 300}` on both sides; before: `VLLM_NIXL_ABORT_REQUEST_TIMEOUT=600`; fewer '
        "waiting requests on decode (--max-num-seqs up); n=1; before 0.11.2 no --async-scheduling. A second try has to "
        "begin at prefill; `kvfix run -- CMD` computes it on the same decode engine (KVF340)",
        good="no release of vLLM is right yet (0.33.0 logs it and goes on): a lease longer than the longest wait on "
        "decode",
        threads=(
            "https://github.com/aws-samples/aws-do-eks/issues/84",
            "https://github.com/vllm-project/aibrix/issues/1772",
            "https://github.com/ai-dynamo/dynamo/issues/14018",
        ),
    ),
    Problem(
        code="KVD574",
        name="nixl-lease-expired",
        severity=Severity.RISK,
        title="Prefill gave up KV blocks that decode did not fetch in time.",
        shows=(
            Logged(
                "Releasing expired KV blocks for request <request> which were retrieved by <count> remote worker(s) "
                "before lease expired",
                at=f"{_V1}/nixl/base_worker.py",
            ),
        ),
        sentence="request {request}, fetched by {count} workers",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Decode did not fetch them in `kv_lease_duration` (30 s, longer with heartbeats): it is down, overloaded "
        "or never got the request, or the client had gone (then it is harmless). With NixlPushConnector the "
        "heartbeats do not renew the lease (vllm#53095): it ends although decode waits.",
        now='look at decode\'s log of that time; `"kv_connector_extra_config": {"kv_lease_duration": 300}` on both'
        " sides",
        good="decode fast enough for what prefill sends, or, with NixlPushConnector, a lease longer than the longest "
        "wait; a router that aborts on both sides",
        threads=("https://github.com/aws-samples/aws-do-eks/issues/84", f"{_ISSUES}/53095"),
    ),
    Problem(
        code="KVD575",
        name="nixl-blocks-timed-out",
        severity=Severity.RISK,
        title="Prefill gave up KV blocks that decode did not fetch before the timeout.",
        shows=(
            Logged(
                "Releasing expired KV blocks for request <request> which were retrieved by <count> decode worker(s) "
                "within <seconds> seconds",
                at=f"{_V1}/nixl_connector.py",
            ),
        ),
        sentence="request {request}, fetched by {count} workers in {seconds} s",
        releases={"vllm": "<0.26"},
        sure=False,
        cause="Decode is down, overloaded or never got the request; or the client had gone (then it is harmless). With "
        "`Potentially invalid KV blocks for unrecognized request` at the same time, for ids that differ only in their "
        "end: decode did fetch, and told prefill its own id (vllm#36958: MLA, prefill with more tensor parallel ranks "
        "than decode): every request holds its blocks until the timeout.",
        now="look at decode's log of that time (handshake, queue); `VLLM_NIXL_ABORT_REQUEST_TIMEOUT=600` on both "
        "sides; ids that differ only in their end: the same --tensor-parallel-size on both sides",
        good="decode fast enough for what prefill sends; vLLM 0.26.0 renews leases by heartbeats",
        threads=(f"{_ISSUES}/25562", f"{_ISSUES}/36958"),
    ),
    Problem(
        code="KVD576",
        name="nixl-failed-handshake-kills-decode",
        severity=Severity.CRASH,
        title="A request whose handshake failed is taken for received, and the decode worker dies.",
        shows=(
            Failed(kind="KeyError", within="block_size_ratio_from_engine_id"),
            Failed(kind="KeyError", within="nixl_connector.py:block_size_ratio"),  # as a report shortened it
            Failed(kind="KeyError", within="get_engine_info"),
            Failed(kind="KeyError", within="tp_ratio_from_engine_id"),
            Failed(kind="KeyError", within="get_target_remote_ranks_from_engine_id"),
            Failed(kind="KeyError", within="_read_blocks", source="self.dst_xfer_side_handles["),
        ),
        releases={"vllm": "<0.26"},
        cause="The handshake with prefill failed before (prefill down or restarted; before 0.15 also prefill with a "
        "larger tensor parallel size than decode), and what is known of an engine is looked up for it all the same.",
        now="restart decode when prefill is up again; the same --tensor-parallel-size on both sides with vLLM before "
        "0.15",
        fixed={"vllm": "0.26.0"},
        threads=(
            f"{_PULLS}/41863",
            f"{_ISSUES}/43523",
            f"{_PULLS}/40364",
        ),
    ),
    Problem(
        code="KVD577",
        name="nixl-sent-request-is-gone",
        severity=Severity.CRASH,
        title="Prefill dies of the end of a transfer whose request was aborted.",
        shows=(
            # Of one function alone, whose long name a pager may have cut.
            Failed(kind="KeyError", source="self._free_blocks(self.requests[req_id])"),
            Failed(kind="KeyError", within="get_finished", source="del self._reqs_to_send[req_id]"),
            Failed(kind="KeyError", within="get_finished", source="self._reqs_to_process.remove(req_id)"),
        ),
        said=(r"KeyError", r"_reqs_to_(?:send|process)\b", r"(?i)nixl"),
        replaces=("KVD586",),
        connectors=("NixlConnector", "MultiConnector"),
        releases={"vllm": "<0.11.2"},
        sure=False,
        cause="The client went away around the end of the prefill: the scheduler forgot the request, and the "
        "connector still reported its blocks as sent or expired. If another connector ran than NixlConnector, it "
        "reported late in the same way, and the settings of NIXL do not help.",
        now="restart prefill; no client timeouts shorter than decode's queue; `VLLM_NIXL_ABORT_REQUEST_TIMEOUT=600`",
        fixed={"vllm": "0.11.2"},
        threads=(
            f"{_ISSUES}/25562",
            "https://github.com/llm-d/llm-d/issues/187",
            f"{_PULLS}/25067",
        ),
    ),
    Problem(
        code="KVD584",
        name="pd-router-sends-no-params",
        severity=Severity.HANG,
        title="A request's kv_transfer_params are not complete: it was promised remote KV, and nothing fetches it.",
        shows=(
            Logged(
                "Got invalid KVTransferParams: <params>. This request will not utilize KVTransfer",
                at=f"{_V1}/nixl_connector.py",
            ),
            Logged(
                "Got invalid KVTransferParams: <params>. This request will not utilize KVTransfer",
                at=f"{_V1}/nixl/pull_scheduler.py",
            ),
            Logged(
                "Got invalid KVTransferParams: <params>. This request will not utilize KVTransfer",
                at=f"{_V1}/mooncake/mooncake_connector.py",
            ),
            Logged(
                "Got invalid KVTransferParams: <params>. This request will not utilize KVTransfer",
                at=f"{_V1}/mooncake_connector.py",
            ),
        ),
        sentence="{params}",
        cause="The router asks decode to load from prefill, but does not hand over what prefill answered (engine id, "
        "blocks, host, port; for Mooncake transfer_id and bootstrap address): it is for another release or connector. "
        "The connector promised the tokens before it looked: the request waits for ever and keeps its blocks, unless "
        "vLLM's own prefix cache had all of it.",
        now="kvfix run -- CMD: such a request computes its prompt itself. Send the whole `kv_transfer_params` of "
        "prefill's answer to decode; use the proxy example of this vLLM release",
        good="a router that fits this vLLM release and connector",
        threads=("https://github.com/llm-d/llm-d/issues/355",),
    ),
)
