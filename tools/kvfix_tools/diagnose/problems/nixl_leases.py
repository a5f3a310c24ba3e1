"""NixlConnector: what has to come in time, in push mode, back from decode, and after a broken connection."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"

PROBLEMS = (
    Problem(
        code="KVD688",
        name="nixl-push-never-came",
        severity=Severity.HANG,
        title="Decode of NixlPushConnector registered a request with prefill, and the KV never came.",
        shows=(
            Logged(
                "NixlPushConnector: registration for request <request> timed out after <seconds>s without a push "
                "completion",
                at=f"{_NIXL}/push_scheduler.py",
            ),
        ),
        said=(
            r"NixlPush",
            r"(?i)never (?:reclaimed|freed|released|arriv\w+|report\w*)|\bleak|not (?:freed|released)",
        ),
        sentence="request {request}, after {seconds} s",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="Prefill writes when it has both the KV and decode's registration. It never got the request, aborted it, "
        "still has it in its queue, gave its blocks up before the registration came, wrote them for another request of "
        "this id, or could not post a write: that it only logs. Decode drops the registration and goes on waiting with "
        "its blocks.",
        now="look for the id in prefill's log (`NIXL transfer failure`, `Releasing expired KV blocks`); abort the "
        'request; restart decode if many wait. `"push_registration_timeout": 60` in kv_connector_extra_config '
        "(default 480 s) shows it sooner",
        good="NixlConnector, where decode reads and sees a failure, until vllm#50754 is in a release",
        threads=(f"{_PULLS}/50754", f"{_ISSUES}/48633", f"{_ISSUES}/46283"),
    ),
    Problem(
        code="KVD689",
        name="nixl-decode-blocks-expired",
        severity=Severity.SLOW,
        title="A later turn of a conversation came after decode had given up its KV blocks.",
        shows=(
            Logged(
                "Declining expired remote read for <request> from engine <engine>.",
                at=f"{_NIXL}/pull_worker.py",
            ),
        ),
        sentence="request {request}",
        releases={"vllm": ">=0.26"},
        cause="With `bidirectional_kv_xfer` prefill reads earlier turns from decode, which keeps the blocks for "
        "`decoder_kv_blocks_ttl` (480 s) and no longer. The read counts as a failed load: by default the request ends "
        "with an error.",
        now='`"kv_load_failure_policy": "recompute"` on prefill; `"decoder_kv_blocks_ttl": 1800` in '
        "kv_connector_extra_config of decode if it has the memory; the router's time to live below it",
        good="a router that does not send blocks older than decoder_kv_blocks_ttl",
        threads=(f"{_PULLS}/47021", f"{_PULLS}/32553"),
    ),
    Problem(
        code="KVD690",
        name="nixl-peer-connected-anew",
        severity=Severity.RISK,
        title="NIXL lost the connection to the other engine, and vLLM makes a new handshake.",
        shows=(
            Logged(
                "Local NIXL metadata for remote engine <engine> was invalidated; re-handshaking after reads drain",
                at=f"{_NIXL}/base_worker.py",
            ),
        ),
        sentence="engine {engine}",
        releases={"vllm": ">=0.32"},
        sure=False,
        cause="A read failed and NIXL had dropped the peer: it died or restarted, or UCX gave the connection up. The "
        "reads of that time failed. Once is what this release is made for; with `backoff` in the line it happens again "
        "and again, and the link or the peer is unwell.",
        now='`"kv_load_failure_policy": "recompute"` on decode, so that no request ends for it; look at the other '
        "engine's log and at `UCX  ERROR` of that time",
        good="a stable link",
        threads=(f"{_PULLS}/28120",),
    ),
    Problem(
        code="KVD569",
        name="nixl-peer-unknown",
        severity=Severity.HANG,
        title="NIXL knows the other engine no more, and refuses every transfer with it.",
        shows=(Logged("createXferReq: metadata for remote agent '<agent>' not found"),),
        sentence="agent {agent}",
        sure=False,
        cause="NIXL forgets a peer when a connection to it fails: the peer died or restarted, or the NIC's queue was "
        "flushed (`UCX  ERROR ... Work Request Flushed Error`, `Endpoint timeout`) before. An engine that does not "
        "shake hands again then fails each request with that peer.",
        now='restart the engine that logs it; `"kv_load_failure_policy": "recompute"` on decode until then; on EFA '
        '`"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}` on both sides instead of UCX',
        good="vLLM 0.32.0, which makes a new handshake with a peer that NIXL has dropped, and a stable link",
        threads=("https://github.com/ai-dynamo/nixl/issues/1983", f"{_PULLS}/28120"),
    ),
    Problem(
        code="KVD1721",
        name="nixl-has-no-telemetry",
        severity=Severity.HANG,
        title="NIXL measures nothing, and vLLM takes each transfer that is done for one that failed.",
        shows=(
            Logged("getXferTelemetry: cannot return values when telemetry is not enabled"),
            Logged("NIXL telemetry is disabled; ignoring telemetry requested through agent config"),
            Failed(kind="nixlNoTelemetryError"),
            Failed(kind="AttributeError", text="'NoneType' object has no attribute 'xferDuration'"),
        ),
        replaces=("KVD571", "KVD570", "KVD156"),
        cause="The KV has arrived. vLLM then asks NIXL how long it took; NIXL has no telemetry, and what it raises "
        "counts as a failed transfer: every request fails or is computed anew. NIXL_TELEMETRY_ENABLE is set to no in "
        "this environment (look at the pod: Dynamo's operator sets it; it goes before what vLLM asks for), or nixl is "
        "1.3.1, which has none without a place to write it to.",
        now="`export NIXL_TELEMETRY_ENABLE=y` for the engines of both sides (Dynamo: under `envs:` of the worker) and "
        "restart them; nixl 1.3.1: `pip install -U nixl nixl-cu13` (CUDA 12: nixl-cu12), until then also "
        "`NIXL_TELEMETRY_DIR=/tmp`",
        good="nixl 1.3.2 or newer, and that variable `y` or not set; no release of vLLM does without telemetry",
        threads=(
            "https://github.com/ai-dynamo/dynamo/issues/12952",
            "https://github.com/ai-dynamo/nixl/issues/2266",
            f"{_PULLS}/58038",
            f"{_PULLS}/51777",
        ),
    ),
    Problem(
        code="KVD1726",
        name="ucx-endpoint-of-a-restarted-peer",
        severity=Severity.HANG,
        title="After a peer was restarted NIXL goes on with the failed endpoint of the old one.",
        shows=(),
        said=(
            r"status -80 \(Endpoint timeout\)|state CONNECTED -> FAILED",
            r"(?i)\brestart",
            r"(?i)\bnixl",
        ),
        replaces=("KVD373",),
        sure=False,
        cause="UCX has given up the endpoint, and NIXL keeps it. The next request to this address ends in "
        "NIXL_ERR_REMOTE_DISCONNECT and hangs, or the worker dies in loadRemoteMD (KVD562).",
        now="restart both engines together, the one that was not restarted last",
        good="a nixl newer than 1.3.2 (nixl issue 1986)",
        threads=(
            "https://github.com/vllm-project/vllm/issues/49238",
            "https://github.com/ai-dynamo/nixl/issues/1986",
        ),
    ),
)
