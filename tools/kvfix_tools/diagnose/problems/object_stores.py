"""S3, the Mooncake store, InfiniStore, SageMaker, GPUDirect Storage and NIXL's storage, in the engine's process."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_CONNECTORS = "lmcache/v1/storage_backend/connector"
_S3 = f"{_CONNECTORS}/s3_connector.py"
_SAGEMAKER = f"{_CONNECTORS}/sagemaker_hyperpod_connector.py"
_SAGEMAKER_L2 = "lmcache/v1/distributed/l2_adapters/sagemaker_hyperpod_client.py"
_MOONCAKE_L2 = "lmcache/v1/distributed/l2_adapters/mooncake_store_l2_adapter.py"
_GDS = "lmcache/v1/storage_backend/gds_backend.py"

PROBLEMS = (
    Problem(
        code="KVD881",
        name="s3-refuses",
        severity=Severity.SLOW,
        title="S3 answers LMCache with an error: nothing is stored there, and nothing found.",
        shows=(
            Logged("Encountering error in S3 HEAD request with error code", _S3),
            Logged("Failed to upload <key> to S3: "),
            Logged("Failed to download <key> from S3: "),
            Failed(kind="RuntimeError", text="Upload failed in S3Connector:", at=_S3),
            Logged("Exception ignored in: <awscrt.s3._S3RequestCore object"),
        ),
        said=(
            r"(?i)lmcache",
            r"AWS_ERROR_S3_\w+|(?i:path[- ]style|virtual[- ]hosted)",
            r"(?i)\bs3 (?:connector|backend|bucket|path|storage)|\bminio\b|\bceph\b",
        ),
        connectors=_IN_PROCESS,
        cause="The status decides: 403 credentials or rights, 301 another region than s3_region, 400 or "
        "AWS_ERROR_S3_INVALID_RESPONSE_STATUS from MinIO, Ceph and the like: the connector puts the bucket into the "
        "host's name (bucket.host), and these are asked as host/bucket. `Exception ignored` has no status: up to 0.5.6 "
        "the error of an upload or a download is raised in a thread of awscrt and lost there (pull 4484 is open).",
        now="read the status where it is not lost: a lookup's line `S3 HEAD request with error code`, the store's own "
        "log, or `aws s3 cp` of a file with the same keys and region; then remote_url: s3://BUCKET.HOST with that name "
        'in DNS (MinIO: MINIO_DOMAIN=HOST); extra_config: {s3_region: "REGION", aws_access_key_id: ..., '
        "aws_secret_access_key: ..., disable_tls: true where it has no TLS}",
        good="no release takes host/bucket addresses (0.5.6; LMCache pull requests 2624 and 4739 are open)",
        sure=False,
        threads=(_LMCACHE + "issues/3376", _LMCACHE + "issues/2621", _LMCACHE + "issues/4483"),
    ),
    Problem(
        code="KVD882",
        name="s3-given-up",
        severity=Severity.SLOW,
        title="LMCache gave S3 up after a few failures, until vLLM is restarted.",
        shows=(
            Logged("S3 connection disabled after <count> consecutive failures."),
            Logged("S3 connection error (<count>/<most>): "),
            Logged("S3L2Adapter disabled after <count> consecutive connection failures"),
            Logged("S3L2Adapter connection error (<count>/<most>): "),
        ),
        cause="Three connection errors in a row (refused, DNS, time out) switch the store off; nothing switches it on "
        "again. The line before has the error.",
        now="curl -I https://BUCKET.HOST from the worker's (or server's) container; then restart it",
        good="no release tries again (0.5.6): a change of network or address",
    ),
    Problem(
        code="KVD883",
        name="s3-object-of-other-size",
        severity=Severity.SLOW,
        title="Objects in S3 are of another size than this configuration's chunks, and are left out.",
        shows=(Logged("Size mismatch for <key>: S3 has <stored> bytes, but current config expects <size> bytes."),),
        sentence="S3 has {stored} bytes, a chunk of this configuration {size}",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.10.post1"},
        cause="They were stored with another chunk_size, dtype or layout of the same model under the same key.",
        now="empty the bucket (aws s3 rm --recursive), or a bucket for each chunk_size and release; then restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD884",
        name="s3-partial-chunk",
        severity=Severity.SLOW,
        title="A partial chunk cannot be written to S3: the end of prompts is not stored.",
        shows=(
            Logged("bytes does not match S3 part size <size> bytes. Partial/unfull chunks are not supported."),
            Failed(kind="AssertionError", text="Saving unfull chunk is not supported in S3Connector."),
            Failed(kind="AssertionError", text="S3 part size must be equal to chunk size in S3Connector"),
        ),
        connectors=_IN_PROCESS,
        cause="The S3 connector stores whole chunks only, and save_unfull_chunk is on (its default before 0.3.11).",
        now="save_unfull_chunk: false (and in LMCache 0.3.9 and 0.3.10 s3_part_size = the chunk's bytes), and restart",
        good="LMCache 0.3.11 or newer, whose default is save_unfull_chunk: false",
    ),
    Problem(
        code="KVD891",
        name="infinistore-chunk-too-large",
        severity=Severity.SLOW,
        title="A chunk is larger than InfiniStore's buffer, and is not stored.",
        shows=(
            Logged("exceeds the maximum allowed size(<most> bytes). Please decrease chunk_size."),
            Failed(
                kind="ValueError",
                text="exceeds the maximum allowed size(<most> bytes). Please decrease chunk_size.",
                at=f"{_CONNECTORS}/infinistore_connector.py",
            ),
        ),
        sentence="the buffer takes {most} bytes",
        connectors=_IN_PROCESS,
        cause="The connector's buffers have a fixed size, and a chunk of this model with its chunk_size is larger.",
        now="chunk_size: 128 (half, until it fits), in every process, and restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD892",
        name="infinistore-write-fails",
        severity=Severity.SLOW,
        title="InfiniStore does not take a chunk over RDMA.",
        shows=(Logged("exception happens in rdma_write_cache_async kv_bytes "),),
        connectors=_IN_PROCESS,
        cause="The error at the end decides; across machines it is RoCE's GID or the link type: the connector speaks "
        "RDMA only, with the device of the URL.",
        now="remote_url: infinistore://HOST:12345/?device=mlx5_0 and extra_config: {infinistore_link_type: "
        "LINK_ETHERNET} (or LINK_IB), the same for the server (--link-type Ethernet), and restart",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_LMCACHE + "issues/503",),
    ),
    Problem(
        code="KVD893",
        name="sagemaker-daemon-missing",
        severity=Severity.CRASH,
        title="The shared memory of SageMaker HyperPod's daemon is not there.",
        shows=(
            Logged("Shared memory segment '<name>' not found. Ensure ai-toolkit daemon is running.", _SAGEMAKER),
            Logged("Invalid offset or length: offset="),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="ai-toolkit's daemon does not run on this node, or its /dev/shm is not the container's: the segment is "
        "shared by name. HyperPod's inference operator 3.2.0 asks for this store whatever l2CacheBackend says.",
        now="start the daemon on the node, give the pod hostIPC: true (or the /dev/shm volume), check "
        "sagemaker_hyperpod_shared_memory_name, and restart; without the daemon: leave l2CacheSpec out",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=("https://github.com/aws/sagemaker-hyperpod-cli/issues/431",),
    ),
    Problem(
        code="KVD897",
        name="nixl-storage-transfer-fails",
        severity=Severity.SLOW,
        title="NIXL's storage backend cannot read or write its objects.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="NIXL transfer failed",
                at="lmcache/v1/storage_backend/nixl_storage_backend.py",
            ),
            Logged("Batch Transfer failed"),
            Logged("NIXL batched put failed for <count> key(s); skipping best-effort offload"),
            Failed(kind="nixlInvalidParamError", within="nixl_storage_backend.py:mem_to_storage"),
            Failed(kind="nixlInvalidParamError", within="nixl_storage_backend.py:storage_to_mem"),
        ),
        connectors=_IN_PROCESS,
        cause="NIXL's own error stands before it (nixl_agent.cpp). `object segment key ... is not registered` with "
        "nixl_async_put: a put and a get at once take each other's place. Else the backend (POSIX, GDS, OBJ) refuses "
        "path, credentials or direct I/O.",
        now="extra_config: {nixl_async_put: false, use_direct_io: false}, and restart",
        good="no release is known to be right with nixl_async_put; else a change of set-up",
        sure=False,
        threads=(_LMCACHE + "issues/2983",),
    ),
    Problem(
        code="KVD452",
        name="server-without-sagemaker-daemon",
        severity=Severity.CRASH,
        title="The LMCache server's L2 on SageMaker HyperPod does not find the daemon of its node.",
        shows=(
            Failed(kind="RuntimeError", text="ai-toolkit shared-memory segment <name> not found", at=_SAGEMAKER_L2),
            Failed(
                kind="FileNotFoundError",
                text="shared-memory segment <name> cannot be opened or mapped",
                at=_SAGEMAKER_L2,
            ),
            Logged("ai-toolkit circuit opened after <count> consecutive failures", _SAGEMAKER_L2),
        ),
        releases={"lmcache": ">=0.5.3"},
        cause="The adapter reads chunks from shared memory that ai-toolkit's daemon made on the same node, and asks it "
        "over HTTP (port 9200). Without the segment the server does not start; without answers the L2 is left out "
        "until one comes.",
        now="curl http://NODE_IP:9200 from the server's pod; start the daemon, hostIPC: true for the server's pod, and "
        '"shared_memory_name" in --l2-adapter as the daemon says (ls /dev/shm), restart the server',
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=("https://github.com/LMCache/LMCache/issues/4114",),
    ),
    Problem(
        code="KVD455",
        name="l2-over-rdma-without-host-memory",
        severity=Severity.CRASH,
        title="The LMCache server's L2 in Mooncake is to use RDMA, and its L1 is no memory that can be registered.",
        shows=(
            Failed(
                kind="ValueError",
                text="RDMA protocol is enabled, but no L1 memory descriptor was provided",
                at=_MOONCAKE_L2,
            ),
            Failed(
                kind="ValueError",
                text="RDMA protocol is enabled, but the L1 memory descriptor is invalid",
                at=_MOONCAKE_L2,
            ),
        ),
        sentence="L1 is no host memory",
        releases={"lmcache": ">=0.4.5"},
        cause="With protocol rdma Mooncake registers the server's L1 once. L1 on GDS (--gds-l1-path) is a file and "
        "has no address.",
        now='lmcache server without --gds-l1-path, with --l1-size-gb; or "protocol": "tcp" in --l2-adapter',
        good="an L1 in host memory where an L2 uses RDMA",
    ),
)
