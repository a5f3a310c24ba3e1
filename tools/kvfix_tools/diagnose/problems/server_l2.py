"""Second-level stores of the LMCache server (`--l2-adapter`) that fail: files, S3, Valkey, Mooncake, NIXL."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_L2 = "lmcache/v1/distributed/l2_adapters"
_FS, _S3, _VALKEY = f"{_L2}/fs_l2_adapter.py", f"{_L2}/s3_l2_adapter.py", f"{_L2}/valkey_l2_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD925",
        name="l2-files-refuse-direct-io",
        severity=Severity.SLOW,
        title="The file system refuses direct I/O: no chunk gets to the server's L2 on disk.",
        shows=(
            Failed(kind="OSError", text="[Errno 22] Invalid argument", within="fs_l2_adapter.py:_write_with_odirect"),
            Logged("Failed to O_DIRECT write <path>", _FS),
            Logged("Failed to O_DIRECT read <path>", _FS),
        ),
        sentence="direct I/O fails",
        releases={"lmcache": ">=0.4.2"},
        cause="The file is opened with O_DIRECT and the write is refused: the buffer's address is not aligned (only "
        "its length is checked), or the file system has no direct I/O. There is no second try without it.",
        now='lmcache server ... --l2-adapter \'{"type": "fs", "base_path": "/mnt/kv", "use_odirect": false}\', and '
        "restart the server",
        good="no release falls back by itself yet (0.5.6; LMCache pull request 4388 is open): use_odirect: false",
        threads=(_LMCACHE + "issues/4386", _LMCACHE + "issues/4364"),
    ),
    Problem(
        code="KVD926",
        name="l2-files-not-written",
        severity=Severity.SLOW,
        title="The server cannot write chunks to its L2 on disk: they are lost when L1 evicts them.",
        shows=(
            Logged("FSL2Adapter failed to store", _FS),
            Logged("FSL2Adapter store task <task> failed", _FS),
        ),
        releases={"lmcache": ">=0.4.2"},
        cause="The errno below this line decides: 22 direct I/O (use_odirect: true), 28 the disk is full, 13 or 30 no "
        "right to write, 2 base_path is gone.",
        now='"use_odirect": false in the adapter\'s JSON for errno 22; df -h and ls -ld on base_path for the others; '
        "restart the server",
        good="a disk with room, and max_capacity_gb with an eviction block in the adapter's JSON",
        sure=False,
        threads=(_LMCACHE + "issues/4386",),
    ),
    Problem(
        code="KVD927",
        name="l2-files-not-read",
        severity=Severity.SLOW,
        title="The server cannot read chunks from its L2 on disk: they are computed again.",
        shows=(
            Logged("FSL2Adapter failed to load", _FS),
            Logged("Incomplete read for <path>: expected <size>, got", _FS),
            Logged("Incomplete O_DIRECT read for <path>: expected <size>, got", _FS),
        ),
        releases={"lmcache": ">=0.4.2"},
        cause="The file was cut off (the server was killed while it wrote, the disk was full), is of another chunk "
        "size, or was deleted meanwhile.",
        now="stop the server, empty base_path, start it again",
        good="a base_path for each chunk size and release; a disk with room",
        sure=False,
    ),
    Problem(
        code="KVD928",
        name="l2-store-fails",
        severity=Severity.WRONG,
        title="An L2 store of the server failed, and the line does not say why.",
        shows=(Logged("Store task <task> to adapter <adapter> failed for keys"),),
        sentence="adapter {adapter} did not store what it was given",
        releases={"lmcache": ">=0.3.15"},
        cause="The adapters are numbered from 0 in the order of --l2-adapter. Those in C++ (resp, which is Redis, and "
        "fs_native, aerospike, nixl_native) report an error to LMCache, which drops its text "
        "(native_connector_l2_adapter.py 0.5.6:512); the others log it above. fs_native leaves a half-written file "
        "that later lookups find and load: gibberish with HTTP 200. Other adapters only lose the chunks.",
        now="resp: redis-cli -h HOST -p PORT ping, info memory and config get maxmemory-policy (noeviction refuses "
        "when it is full), and SET by hand with the same password; fs_native: stop the server, empty base_path, df -h "
        'on it, take "type": "fs" instead',
        good="resp: maxmemory with allkeys-lru, a reachable Redis with the adapter's password; no release of "
        'fs_native is known to be right (0.5.6): "type": "fs"',
        sure=False,
        threads=(_LMCACHE + "issues/4991", _LMCACHE + "pull/5119", _LMCACHE + "issues/5123"),
    ),
    Problem(
        code="KVD700",
        name="l2-backend-fails",
        severity=Severity.SLOW,
        title="The server's L2 backend fails at stores, lookups or loads: these chunks are computed again.",
        shows=tuple(
            Logged(text)
            for text in (
                "RawBlockL2Adapter store task <task> failed: <error>",
                "RawBlockL2Adapter lookup task <task> failed: <error>",
                "RawBlockL2Adapter load task <task> failed: <error>",
                "HFBucketL2Adapter store task failed",
                "HFBucketL2Adapter store task partially failed",
                "HFBucketL2Adapter lookup task failed",
                "HFBucketL2Adapter load task failed",
                "Batch download from hfbucket raised: <error>",
                "BigtableL2Adapter connection error (<count>): <error>",
                "BigtableL2Adapter disabled after <count> consecutive failures",
                "BigtableL2Adapter store failed: <error>",
                "BigtableL2Adapter write failed for <key>: <error>",
                "BigtableL2Adapter lookup failed for <key>: <error>",
                "Failed to reassemble sharded payload for <key>: <error>",
                "BigtableL2Adapter lookup failed: <error>",
                "BigtableL2Adapter load failed: <error>",
                "SageMaker HyperPod store failed: <error>",
                "SageMaker HyperPod lookup failed: <error>",
                "SageMaker HyperPod load failed: <error>",
                "SageMaker HyperPod load lookup failed: <error>",
                "ai-toolkit <method> <path> failed: <error>",
                "SageMaker HyperPod shared-memory load failed: <error>",
                "DAX L2 store failed for key <key>",
                "DAX L2 lookup failed",
                "DAX L2 load failed",
            )
        ),
        releases={"lmcache": ">=0.4.5"},
        sure=False,
        quotes=True,
        cause="The error after the colon, or the traceback's last line below it, decides: the backend is not reached, "
        "refuses the credentials, is full, or the device or its /dev/shm is not the server's container's. Bigtable "
        "and SageMaker's daemon are left alone after some failures in a row; then the server works with L1 only.",
        now="put right what the error says: address, credentials, room on the device, hostIPC or /dev/shm for "
        "SageMaker's ai-toolkit, and restart the server (one with Bigtable does not come back to it by itself)",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD933",
        name="l2-adapter-not-known",
        severity=Severity.CRASH,
        title="The server does not start: an --l2-adapter is not valid.",
        shows=(
            Failed(kind="ValueError", text="--l2-adapter #<number>", at=f"{_L2}/config.py"),
            Logged("Error parsing --l2-adapter #<number>", f"{_L2}/config.py"),
            Failed(kind="ValueError", text="unknown L2 adapter type <type>"),
            Failed(kind="ValueError", text="'serde' dict must include a 'type' field"),
            Failed(kind="ValueError", text="No adapter factory registered for type <type>."),
        ),
        releases={"lmcache": ">=0.3.15"},
        cause="The text says which: JSON that the shell has taken apart (single quotes around it), a type that this "
        "release does not know, or a field that is missing.",
        now='--l2-adapter \'{"type": "fs", "base_path": "/mnt/kv"}\' in single quotes; lmcache server --help lists '
        "types",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD937",
        name="server-loop-fails",
        severity=Severity.HANG,
        title="The server's loop for L2 raised: prefetches may never end, and requests wait for them.",
        shows=(
            Logged("Unexpected error in prefetch loop while"),
            Logged("Unexpected error advancing in-flight prefetch request"),
            Logged("Unexpected error in store loop while processing fd"),
            Logged("Unexpected error draining L2 store completions"),
            Logged("Unexpected error advancing in-flight store task"),
            Logged("Failed to submit store task to adapter <adapter>"),
            Logged("Failed starting prefetch request <request>"),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="The traceback below this line says what; from LMCache 0.5.6 on the prefetch is ended, before it stays "
        "open and its request with it.",
        now="restart the server, then vLLM; leave the --l2-adapter of the traceback out",
        good="LMCache 0.5.6, which ends such a prefetch (prefetch_controller.py)",
        sure=False,
    ),
    Problem(
        code="KVD944",
        name="l2-objects-of-another-group",
        severity=Severity.SLOW,
        title="What was loaded from L2 has the size of another KV group, and the load fails.",
        shows=(
            Failed(
                kind="ValueError",
                text="Size mismatch: memory_obj nbytes=<loaded>, gpu_buffer nbytes=<wanted>",
                at="lmcache/v1/gpu_connector/gpu_ops.py",
            ),
        ),
        sentence="{loaded} bytes were loaded, the group has {wanted}",
        releases={"lmcache": ">=0.5.1,<0.5.3"},
        connectors=("LMCacheMPConnector", "MultiConnector"),
        cause="A model with several kinds of attention (sliding windows, DeepSeek V4): the server stores an object "
        "for each kind, and makes room for all of them by the layout of the first when it loads from L2.",
        now="lmcache server --no-separate-object-groups, with an L2 that is empty; or without --l2-adapter",
        fixed={"lmcache": "0.5.3"},
        threads=(_LMCACHE + "issues/4179",),
    ),
    Problem(
        code="KVD951",
        name="l2-serde-with-several-groups",
        severity=Severity.SLOW,
        title="The serde of an L2 adapter takes an object of several KV groups for one: nothing is stored in L2.",
        shows=(
            Failed(kind="RuntimeError", text="' is invalid for input of size <size>", within="serde/fp8.py:serialize"),
            Failed(kind="RuntimeError", text="' is invalid for input of size <size>", within="turboquant.py:serialize"),
        ),
        releases={"lmcache": ">=0.5.1"},
        cause="A hybrid model has several groups in one object; fp8 and turboquant look at it in the form of the first "
        "group.",
        now='without "serde" in --l2-adapter',
        good="no release is right yet (0.5.6 is so); issue 4972 is open",
        threads=(_LMCACHE + "issues/4972",),
    ),
    Problem(
        code="KVD193",
        name="l2-object-of-other-size",
        severity=Severity.SLOW,
        title="An object in the server's L2 has another size than the chunk: it is left out.",
        shows=(
            Logged("Downloaded object <key> has <size> bytes, expected <wanted> bytes; rejecting load"),
            Logged("Downloaded object <key> read <size> bytes, expected <wanted> bytes; rejecting load"),
        ),
        sentence="{size} bytes, a chunk has {wanted}",
        cause="It was written with another --chunk-size, --l1-align-bytes, dtype or layout of the same model, or its "
        "upload was cut off.",
        now="empty the bucket, or take another one; the same options for each server that shares it",
        good="a bucket for each release and chunk size",
    ),
    Problem(
        code="KVD1782",
        name="l2-cannot-delete",
        severity=Severity.LEAK,
        title="The server cannot delete chunks from its L2: it grows beyond its limit.",
        shows=(
            Logged("FSL2Adapter failed to delete <path>"),
            Logged("FSL2Adapter delete failed: <error>"),
            Logged("Valkey DEL failed for key idx <index>: <error>"),
            Logged("BigtableL2Adapter delete failed: <error>"),
            Logged("BigtableL2Adapter delete failed for <key>: <error>"),
            Logged("HFBucketL2Adapter delete failed: <error>"),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="Eviction deletes, and the store refuses: no right to delete (a folder of another user, a key without "
        "it), a file that someone else has deleted (harmless), or no connection.",
        now="ls -ld on base_path as the server's user, or the store's rights for deleting; until then df -h, and empty "
        "it by hand while the server stands",
        good="a base_path or an account of the server's own",
        sure=False,
    ),
    Problem(
        code="KVD1783",
        name="l2-plugin-not-loaded",
        severity=Severity.CRASH,
        title="The server does not start: the class of an L2 plugin cannot be loaded.",
        shows=(
            Failed(kind="ImportError", text="Could not import module '<module>': <error>"),
            Failed(kind="AttributeError", text="Module '<module>' has no class '<name>': <error>"),
            Failed(kind="TypeError", text="<name> is not a subclass of L2AdapterInterface"),
            Failed(kind="TypeError", text="<name> instance missing required method"),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="--l2-adapter of type plugin or native_plugin names module_path and class_name: the module does not "
        "import in the server's environment, has no such class, or the class is for another LMCache release.",
        now="python -c 'import MODULE' in the server's container; pip install the plugin there; module_path and "
        "class_name as its own documentation says",
        good="the plugin in the server's image, of the release that fits its LMCache",
    ),
)
