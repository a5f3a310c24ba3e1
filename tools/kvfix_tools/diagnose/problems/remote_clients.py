"""Clients of remote stores: Valkey, SageMaker HyperPod, and what they read that does not fit."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem, either

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_CONNECTORS = "lmcache/v1/storage_backend/connector"
_VALKEY = f"{_CONNECTORS}/valkey_connector.py"
_HF3FS = f"{_CONNECTORS}/hf3fs_adapter.py"
_BIGTABLE = f"{_CONNECTORS}/bigtable_connector.py"
_MOONCAKE = f"{_CONNECTORS}/mooncakestore_connector.py"
_SAGEMAKER = f"{_CONNECTORS}/sagemaker_hyperpod_connector.py"

PROBLEMS = (
    Problem(
        code="KVD172",
        name="valkey-client-fails",
        severity=Severity.SLOW,
        title="LMCache's Valkey client cannot connect, write or read.",
        shows=(
            Logged("Fail to init valkey connection <error>"),
            Failed(kind="RuntimeError", text="Fail to init valkey connection <error>", at=_VALKEY),
            Logged("Fail to put data: <error>", _VALKEY),
            Logged("Fail to converting : <error>", _VALKEY),
        ),
        sentence="{error}",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.4.3"},
        sure=False,
        cause="The error is valkey-glide's: connection refused or timed out (address, TLS), NOAUTH (valkey_username, "
        "valkey_password), MOVED or a cluster's client for one node (valkey_mode), OOM (it is full).",
        now="valkey-cli -h HOST -p PORT --user NAME ping from the worker's container; extra_config: {valkey_mode: "
        "cluster or standalone, valkey_username: ..., valkey_password: ...}; maxmemory-policy allkeys-lru; then "
        "restart",
        good="LMCache 0.4.3 or newer, whose client for Valkey is another one",
    ),
    Problem(
        code="KVD1214",
        name="valkey-answers-into-freed-memory",
        severity=Severity.CRASH,
        title="Valkey's client writes an answer into a chunk that was given up: crashes, or wrong KV.",
        shows=(Died(within="valkey_connector.py:_do_get_into"), Died(within="glide_client.py:_execute_command")),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.3,<0.5.0"},
        sure=False,
        cause="A get hands the chunk's own memory to the client (valkey_connector.py 0.4.3:212). When it times out, "
        "the chunk is freed and used again, and the client's native thread writes into it when the answer comes: other "
        "objects of the process are damaged, and it dies at some later place. Without the remote store it never does.",
        now="unset LMCACHE_REMOTE_URL (remote_url), or LMCACHE_REMOTE_URL=redis://HOST:6379 with the same server, and "
        "restart with an empty store",
        fixed={"lmcache": "0.5.0"},
        threads=("https://github.com/valkey-io/valkey-glide/issues/6215", _LMCACHE + "pull/3609"),
    ),
    Problem(
        code="KVD173",
        name="remote-url-with-several-hosts",
        severity=Severity.CRASH,
        title="remote_url names several hosts, and this store takes one.",
        shows=(
            Failed(kind="ValueError", text="connector only supports a single host, but got url: <url>"),
            Failed(kind="ValueError", text="Only one host is supported for <store>, but got <hosts>"),
            Logged("Only one host is supported for <store>, but got"),
        ),
        connectors=_IN_PROCESS,
        cause="Hosts in remote_url are separated by commas; only redis-sentinel:// and a Valkey or Redis cluster take "
        "more than one.",
        now="remote_url: redis://HOST:6379 with one host (mooncakestore://MASTER:50051, lm://HOST:65432), and restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD174",
        name="sagemaker-daemon-answers-badly",
        severity=Severity.SLOW,
        title="SageMaker HyperPod's daemon does not answer, or names memory that is not there.",
        shows=(
            Logged("HTTP <operation> client error: <url>", _SAGEMAKER),
            Logged("PUT failed: key=<key>, status=<status>", _SAGEMAKER),
            Logged("PUT exception: key=<key>", _SAGEMAKER),
            Logged("GET error: key=<key>", _SAGEMAKER),
            Logged("Failed to read from shared memory: key=<key>", _SAGEMAKER),
            Logged("Error reading from shared memory: key=<key>", _SAGEMAKER),
            Logged("Offset out of bounds: offset=", _SAGEMAKER),
            Logged("Read would exceed shared memory bounds", _SAGEMAKER),
            Logged("Failed to initialize shared memory: <error>", _SAGEMAKER),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        sure=False,
        cause="Chunks go to ai-toolkit's daemon on the same node by HTTP and come back through its shared memory. "
        "HTTP errors: it is down, overloaded or full (status 507). Offsets out of bounds: another segment is mapped "
        "than the daemon's (it was restarted, or sagemaker_hyperpod_shared_memory_name names another).",
        now="the daemon's log on this node; curl its port from the container; hostIPC: true; restart the daemon, then "
        "the engine (which maps its memory once)",
        good="a daemon that is up before the engine, with memory for the working set",
    ),
    Problem(
        code="KVD175",
        name="remote-chunk-of-other-size",
        severity=Severity.SLOW,
        title="A chunk from the remote store is not of the size that this engine counts with.",
        shows=(
            *either(
                "bytes_read: <read> is illegal, single_token_size: <token>, full_chunk_size: <chunk>",
                "bytes_read: <read> is illegal, single_token_size: <token>, full_chunk_size_bytes: <chunk>",
            ),
            Logged("Valkey GET size mismatch for key <key>: read <read> bytes, expected <chunk>; treating as miss."),
        ),
        sentence="{read} bytes were read, a chunk has {chunk}",
        cause="Without metadata in the store (save_chunk_meta: false) the size is counted from this engine's layers, "
        "heads and dtype: one token is single_token_size. Keys hold the model's name, world size and dtype, but "
        "neither chunk_size nor --block-size: another engine with other ones wrote it, or it was cut off while it was "
        "written.",
        now="empty the store's keys of this model, the same chunk_size, --kv-cache-dtype and tensor-parallel-size in "
        "all engines that share it; restart",
        good="a database or prefix for each configuration",
    ),
    Problem(
        code="KVD176",
        name="mooncake-object-of-other-shape",
        severity=Severity.SLOW,
        title="What Mooncake delivers is not a chunk of this configuration, or cannot be read back so.",
        shows=(
            Logged("Reshape failed for key <key>: <error>", _MOONCAKE),
            Logged("Failed to process buffer <number> for key <key>: <error>", _MOONCAKE),
            Logged("Metadata required for batch_get_into but not available", _MOONCAKE),
            Logged("Single get operation is not supported. Use batched_get instead.", _MOONCAKE),
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="With save_chunk_meta: false the shape comes from this engine, and the stored object has another (other "
        "chunk_size, dtype, tensor parallel size). `Metadata required`: the connector was made before the engine knew "
        "its shape. `Single get`: use_layerwise or blending asks chunk by chunk, which this connector cannot.",
        now="use_layerwise: false and enable_blending: false; the same chunk_size and --tensor-parallel-size "
        "everywhere; restart mooncake_master, which empties the store",
        good="extra_config: {save_chunk_meta: true}, which stores the shape with the chunk",
    ),
    Problem(
        code="KVD177",
        name="remote-store-given-up",
        severity=Severity.SLOW,
        title="The remote store cannot be made with this configuration: LMCache stops trying.",
        shows=(Logged("Irrecoverable error during connection initialization"),),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.13"},
        cause="The traceback below it says why: wrong credentials, a package that is missing, an address that cannot "
        "be. The engine serves on without the store, and does not try again before a restart.",
        now="put right what the last line of that traceback says, then restart the engine",
        good="what that line names",
        announces=True,
        sure=False,
    ),
    Problem(
        code="KVD178",
        name="s3-staging-exhausted",
        severity=Severity.CRASH,
        title="LMCache's S3 connector has no buffer left for another request.",
        shows=(Failed(kind="RuntimeError", text="No more shared memory buffers available"),),
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.10.post1"},
        cause="It has s3_max_inflight_reqs buffers in /dev/shm, each of one chunk, and more chunks than that are read "
        "at once; a request that fails does not give its buffer back.",
        now="extra_config: {s3_max_inflight_reqs: 256}, with that many chunks of /dev/shm (docker --shm-size); restart",
        good="LMCache 0.3.10.post1 or newer, which reads into the CPU cache itself",
    ),
    Problem(
        code="KVD197",
        name="lm-key-too-long",
        severity=Severity.SLOW,
        title="A key is longer than the protocol of lm:// takes: nothing is stored or found.",
        shows=(
            Failed(
                kind="AssertionError", text="Key length <length> exceeds maximum <most>", at="lmcache/v1/protocol.py"
            ),
            Logged("Key length <length> exceeds maximum <most>"),
        ),
        sentence="the key has {length} characters, the protocol takes {most}",
        connectors=_IN_PROCESS,
        cause="The key holds the model's name as vLLM was given it: for a model from a folder, its whole path.",
        now="a shorter path: ln -s /long/path/to/model /m and vllm serve /m --served-model-name NAME; in every engine "
        "the same; restart",
        good="redis:// or `lmcache server`, whose keys may be longer",
    ),
    Problem(
        code="KVD1785",
        name="store-package-missing",
        severity=Severity.CRASH,
        title="A store needs a Python package or an extension that is not in this environment.",
        shows=(
            *either("azure-storage-blob is required for the Azure connector. Install it with"),
            *either("azure-identity is required to use DefaultAzureCredential. Install it with"),
            *either("huggingface_hub version is too old for Buckets support; install"),
            *either("hf3fs_fuse.io is not available. Please install the hf3fs_fuse package"),
            *either("RESPClient requires the C++ Redis extension. Build with"),
            *either("AerospikeClient requires the C++ Aerospike extension. Build with"),
            Failed(kind="ImportError", text="needs confluent-kafka: pip install"),
        ),
        releases={"lmcache": ">=0.3.15"},
        cause="LMCache's wheel brings no clients of stores but Redis'. `Extension`: the wheel for this platform has it "
        "not, and pip built LMCache without it.",
        now="the pip install that the line names, in the environment of the process that says it (vLLM's, or the "
        "server's); `extension`: another store (resp: redis:// in place of resp://), or LMCache built from source",
        good="an image with the package",
    ),
    Problem(
        code="KVD1786",
        name="store-of-3fs-refused",
        severity=Severity.SLOW,
        title="The settings of the 3FS connector are refused: nothing is stored there.",
        shows=(
            Logged("Invalid configuration of HF3fsConnector", _HF3FS),
            Logged("Invalid mount point:<path>", _HF3FS),
            Logged("Invalid base_paths_str:<path>, <error>", _HF3FS),
            Logged("hf3fs_ior_entries must in range", _HF3FS),
            Logged("hf3fs_iov_size must in range", _HF3FS),
            Logged("hf3fs_io_depth must in range", _HF3FS),
            Logged("hf3fs_numa_id must in range", _HF3FS),
            Logged("hf3fs_io_thread_num must in range", _HF3FS),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.5"},
        cause="The line has the value or its range; a mount point has to be a folder that 3FS is mounted on in this "
        "container, and the paths of the URL lie below it.",
        now="mount | grep hf3fs in the worker's container; extra_config with a value in the range; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1787",
        name="bigtable-refuses",
        severity=Severity.SLOW,
        title="Bigtable refuses LMCache, or has no such table: nothing is stored there, and nothing found.",
        shows=(
            Logged("Bigtable permission/auth error in <call>: <error>", _BIGTABLE),
            Logged("Bigtable auth error in <call>: <error>", _BIGTABLE),
            Logged("Bigtable NotFound in <call>: <error>", _BIGTABLE),
        ),
        sentence="{call}: {error}",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.7"},
        cause="Permission: the service account has no roles/bigtable.user, or there are no credentials in this "
        "container. NotFound: project, instance, table or column family are named otherwise, or not made.",
        now="gcloud auth application-default print-access-token in the worker's container; cbt -project P -instance I "
        "ls TABLE; the names in extra_config as there; restart",
        good="a service account with roles/bigtable.user, and the table before the engine",
    ),
)
