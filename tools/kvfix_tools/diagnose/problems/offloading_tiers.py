"""Secondary tiers of vLLM's OffloadingConnector: files, object stores, peers."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_OFFLOAD = "vllm/v1/kv_offload"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_MANAGER = f"{_OFFLOAD}/tiering/obj/manager.py"

PROBLEMS = (
    Problem(
        code="KVD640",
        name="offload-file-tier-fails",
        severity=Severity.HANG,
        title="The file tier cannot read or write a block.",
        shows=(Logged("Job <job> block I/O failed: <reason>", at=f"{_OFFLOAD}/tiering/fs/thread_pool.py"),),
        sentence="{reason}",
        releases={"vllm": ">=0.26"},
        cause="The reason is the operating system's: no space, no permission, a file that is gone or short, a file "
        "system without O_DIRECT. Before vLLM 0.32 a failed read is tried again on every step, and its request never "
        "ends.",
        now="space and rights of `root_dir` (`df -h`, `ls -ld`); empty it while no engine runs; without "
        "`secondary_tiers` until then; abort the requests that hang",
        good="vLLM 0.32.0 (a failed read counts as a miss), and a file system with room",
        threads=(f"{_ISSUES}/49176",),
    ),
    Problem(
        code="KVD641",
        name="offload-object-store-unreachable",
        severity=Severity.CRASH,
        title="The object store of the offloading tier does not answer as configured.",
        shows=(Failed(kind="RuntimeError", text="Object store tier connectivity probe failed", at=_MANAGER),),
        releases={"vllm": ">=0.26"},
        cause="Bucket, endpoint, scheme or credentials do not fit: the probe at the start could not look up an object.",
        now="`aws s3 ls s3://BUCKET --endpoint-url URL` with the same credentials in the engine's container; `bucket`, "
        "`endpoint_override` and `scheme` of the tier; no HTTP proxy between",
        good="the configuration",
    ),
    Problem(
        code="KVD642",
        name="offload-object-store-transfer-fails",
        severity=Severity.SLOW,
        title="Transfers with the object store of the offloading tier fail.",
        shows=(
            Logged("transfer failed job=<job> state=<state>", at=_MANAGER),
            Logged("register_memory (OBJ) failed for job <job>", at=_MANAGER),
            Logged("check_xfer_state raised for job <job>", at=_MANAGER),
            Logged("prep_xfer_dlist (OBJ) failed for job <job>", at=_MANAGER),
            Logged("make_prepped_xfer failed for job <job>", at=_MANAGER),
            Logged("agent.transfer failed for job <job>", at=_MANAGER),
        ),
        sentence="job {job}",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="The store refuses or is slow (credentials that ran out, quota, throttling), or NIXL's OBJ plugin "
        "failed; what is not loaded is computed again.",
        now="the store's own log and limits at that time; renew the credentials and restart",
        good="a store with room for the rate",
    ),
    Problem(
        code="KVD643",
        name="offload-peer-transfer-lost",
        severity=Severity.HANG,
        title="The P2P tier lost its NIXL connection, and the other engine's request waits for ever.",
        shows=(
            Logged("error handling message 'fetch' (count=<count>): NIXL_ERR_REMOTE_DISCONNECT"),
            Logged("check_xfer_state failed for transfer_id=<transfer>: NIXL_ERR_REMOTE_DISCONNECT"),
            Failed(kind="nixlRemoteDisconnectError", within="nixl.py:write_blocks"),
            Failed(kind="nixlNotFoundError", within="nixl.py:write_blocks"),
        ),
        cause="A failed transfer of this tier is only logged, never reported as failed, so the request that waits for "
        "it does not come to kv_load_failure_policy.",
        now="restart the engine whose connection broke (both, if it does not come back); leave the `p2p` tier out of "
        "secondary_tiers",
        good="no release is right yet (vLLM 0.32.0 is so)",
        threads=(f"{_ISSUES}/55181",),
    ),
    Problem(
        code="KVD645",
        name="offload-too-many-peers",
        severity=Severity.SLOW,
        title="The P2P tier refuses a peer: its limit of sessions is reached.",
        shows=(Logged("session limit reached (<have>/<most>)"),),
        sentence="{have} of {most}",
        cause="More engines than VLLM_P2P_MAX_PEERS want to exchange blocks.",
        now="`export VLLM_P2P_MAX_PEERS=` more than there are engines, restart",
        good="the configuration",
    ),
    Problem(
        code="KVD646",
        name="offload-peer-silent",
        severity=Severity.SLOW,
        title="A peer of the P2P tier does not answer.",
        shows=(
            Logged("handshake timed out after <seconds>s", at=f"{_OFFLOAD}/tiering/p2p/session/session.py"),
            Logged("failed to open connection to <peer>", at=f"{_OFFLOAD}/tiering/p2p/manager.py"),
        ),
        releases={"vllm": ">=0.32"},
        cause="The peer is down, or its address and port are not reachable from here.",
        now="start the peer, open its port; the address that the router or the tier's configuration names must be "
        "reachable from every engine",
        good="the set-up",
    ),
    Problem(
        code="KVD647",
        name="tiering-ended-before-last-store",
        severity=Severity.CRASH,
        title="The tiers had forgotten a finished request when its last block was to be stored, and EngineCore dies.",
        shows=(
            Failed(
                kind="KeyError",
                within="tiering/manager.py:prepare_store",
                source="self._req_state[req_context.req_id]",
                at=f"{_OFFLOAD}/tiering/manager.py",
            ),
        ),
        releases={"vllm": ">=0.26,<0.32"},
        cause="In vLLM 0.26.0 OffloadingConnector tells the tiers that a request has ended at once, and stores its "
        "last block a step later. Without another store in flight they no longer know the request. 0.32.0 tells them "
        "after the store.",
        now='without "secondary_tiers" in kv_connector_extra_config (the CPU tier alone), restart',
        fixed={"vllm": "0.32.0"},
        threads=(
            "https://github.com/local-inference-lab/rtx6kpro/issues/60",
            "https://github.com/vllm-project/vllm/pull/46284",
        ),
    ),
)
