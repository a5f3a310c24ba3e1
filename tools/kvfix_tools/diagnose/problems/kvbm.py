"""KVBM, the DynamoConnector of ai-dynamo, and NIXL's file backends below it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_DYNAMO = "https://github.com/ai-dynamo/dynamo/"

PROBLEMS = (
    Problem(
        code="KVD127",
        name="kvbm-disk-needs-gds",
        severity=Severity.WRONG,
        title="KVBM's disk tier cannot be read without GPUDirect Storage: requests hang, or get another request's KV.",
        shows=(
            Logged("GDS_MT: failed to create file handle"),
            Logged("GDS_MT: file register error: error=<code>"),
            Logged("Batched connector transfer failed: Failed to create XferRequest"),
            Logged("Failed to write to blocks: Other(Failed to create XferRequest)"),
        ),
        said=(
            r"KVBM|DYN_KVBM|DynamoConnector",
            r"(?i)disk to (?:the )?(?:device|gpu)|from (?:the )?disk",
            r"(?i)\bhangs?\b|stuck",
        ),
        sure=False,
        cause="KVBM loads from disk to the GPU by NIXL's backend GDS_MT only. Without nvidia-fs (no kernel module, a "
        "file system that cuFile does not know, a container without /dev/nvidia-fs*) the files are not registered, and "
        "each load fails without a report to vLLM. KVBM v2 without a `GDS_MT` line: its backend POSIX is not loaded "
        "(KVD128).",
        now="`unset DYN_KVBM_DISK_CACHE_GB` and restart (host memory alone works); or `modprobe nvidia_fs` on the "
        "host, /dev/nvidia-fs* in the container, and `gdscheck -p` has to say that the file system is supported. "
        "Distrust answers that came after the first of these lines",
        good="no release of KVBM reads its disk tier without GDS, and it is not developed further: "
        "`--kv-offloading-size` of vLLM with a file tier",
        threads=(_DYNAMO + "issues/6032", _DYNAMO + "issues/5012", _DYNAMO + "issues/15079", _DYNAMO + "issues/13755"),
    ),
    Problem(
        code="KVD128",
        name="nixl-no-backend-for-both-memories",
        severity=Severity.HANG,
        title="NIXL has no backend in which both sides of a transfer are registered.",
        shows=(
            Logged("createXferReq: no specified or potential backend had the required registrations"),
            Logged("createXferReq: no potential backend found"),
        ),
        sure=False,
        cause="A transfer needs one backend that knows both memories: UCX host and GPU, POSIX host and file, GDS GPU "
        "and file. One of the two was not registered (an error of `registerMem` or of GDS before it), or the backend "
        "is not loaded.",
        now="KVBM with DYN_KVBM_DISK_CACHE_GB: `DYN_KVBM_NIXL_BACKEND_POSIX=true`, or GDS as `gdscheck -p` wants it, "
        "or without the disk; elsewhere name the backend of the destination (`backends`, `nixl_backend`)",
        good="a backend for each kind of memory that is used",
        threads=(_DYNAMO + "issues/6032", _DYNAMO + "pull/8806"),
    ),
)
