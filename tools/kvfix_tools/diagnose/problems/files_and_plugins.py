"""Files as a store (fs://, local_disk), and stores of one's own."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_CONNECTORS = "lmcache/v1/storage_backend/connector"

PROBLEMS = (
    Problem(
        code="KVD876",
        name="files-not-written",
        severity=Severity.SLOW,
        title="Chunks could not be written to the file system: later requests will not find them.",
        shows=(
            Logged("Failed to write file <path>: [Errno", f"{_CONNECTORS}/fs_connector.py"),
            Logged("Failed to write to file <path>: [Errno"),
        ),
        connectors=_IN_PROCESS,
        cause="The errno decides: 28 the file system is full (fs:// evicts nothing), 13 or 30 no right to write, 2 the "
        "folder is gone, 22 no direct I/O there (extra_config use_odirect).",
        now="df -h and ls -ld on the folder of remote_url; use_odirect: false in extra_config for errno 22",
        good="a job that deletes old files: no release of the fs:// connector evicts; local_disk with "
        "max_local_disk_size does",
        threads=(_LMCACHE + "issues/1862",),
    ),
    Problem(
        code="KVD877",
        name="files-not-read",
        severity=Severity.SLOW,
        title="A chunk's file could not be read: it is computed again.",
        shows=(
            Logged("Failed to read from file <path>: ", f"{_CONNECTORS}/fs_connector.py"),
            Logged("Failed to load chunk from disk for key"),
            Failed(kind="RuntimeError", text="Partial read data <wanted> got <read>"),
            Failed(kind="RuntimeError", text="Partial read meta <wanted> got <read>"),
        ),
        connectors=_IN_PROCESS,
        cause="The error at the end decides: a file that was cut off by a crash (`Partial read`), written with another "
        "chunk_size or release, deleted meanwhile, or without the right to read.",
        now="delete the files of the folder once, and restart; one folder for each model, chunk_size and release",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD878",
        name="disk-is-full",
        severity=Severity.SLOW,
        title="The file system of a cache is full: chunks cannot be written.",
        shows=(
            Logged("No space left on device"),
            Failed(kind="OSError", text="[Errno 28] No space left on device"),
        ),
        replaces=("KVD865",),
        cause="max_local_disk_size is for each worker, so with tensor parallel 8 eight times that is used; fs:// and "
        "the server's fs and fs_native adapters evict nothing unless max_capacity_gb and eviction are set. In /dev/shm "
        "it is the container's shared memory (--shm-size).",
        now="df -h; max_local_disk_size at most the free space divided by the workers; docker --shm-size=16g if it is "
        "/dev/shm",
        good="keep it so: the set-up was wrong, and no release changes that",
        sentence="no space left on device",
        sure=False,
        threads=(_LMCACHE + "issues/1399", _LMCACHE + "issues/1454"),
    ),
    Problem(
        code="KVD879",
        name="storage-plugin-fails",
        severity=Severity.SLOW,
        title="A storage plugin or a remote connector of one's own could not be loaded; LMCache goes on without it.",
        shows=(
            Logged("Failed to create backend <name>: <error>", "lmcache/v1/storage_backend/__init__.py"),
            Logged("Failed to create remote backend for plugin <name>: <error>"),
            Logged("Failed to load remote connector <name> due to import/attribute error: <error>"),
            Logged("Failed to create remote connector <name> adapter: <error>"),
        ),
        sentence="{name}: {error}",
        connectors=_IN_PROCESS,
        cause="The module does not import in vLLM's environment, the class is not in it, or its constructor raised: "
        "the error after the name says which.",
        now="python -c 'import MODULE' in vLLM's environment; extra_config storage_plugin.NAME.module_path and "
        "storage_plugin.NAME.class_name",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD880",
        name="storage-plugin-not-configured",
        severity=Severity.SLOW,
        title="A storage plugin is named, but not where its class is: it is left out.",
        shows=(
            Logged("Backend <name> missing module_path or class_name"),
            Logged("is set but extra_config is empty; plugin settings must be provided under extra_config"),
            Logged("missing adapter module_path or class_name"),
        ),
        connectors=_IN_PROCESS,
        cause="extra_config lacks module_path or class_name of the plugin, or they stand one level too deep.",
        now="extra_config: {storage_plugin.NAME.module_path: my.module, storage_plugin.NAME.class_name: MyBackend}",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD698",
        name="disk-folder-made-twice",
        severity=Severity.CRASH,
        title="Several workers make LMCache's disk folder at the same time, and all but one die of it.",
        shows=(
            Failed(
                kind="FileExistsError", text="[Errno 17] File exists: '<path>'", within="local_disk_backend.py:__init__"
            ),
        ),
        sentence="{path} was made by another worker in between",
        releases={"lmcache": "<0.4.4"},
        cause="LocalDiskBackend asks whether the folder exists and makes it if not, in two steps. With tensor "
        "parallelism two workers stand between them. It happens once, at the first start: the folder is there now.",
        now="mkdir -p the folder of local_disk before vLLM starts (new volume: an init container), or just restart",
        fixed={"lmcache": "0.4.4"},
        threads=("https://github.com/LMCache/LMCache/issues/2486",),
    ),
    Problem(
        code="KVD961",
        name="evicted-file-is-gone",
        severity=Severity.CRASH,
        title="LMCache evicts a chunk from disk whose file is not there any more, and the engine dies of it.",
        shows=(
            Failed(kind="FileNotFoundError", within="local_disk_backend.py:remove"),
            Failed(kind="FileNotFoundError", within="local_disk_backend.py:submit_put_task"),  # evicts before it writes
        ),
        sure=False,
        cause="LocalDiskBackend deletes the file without asking whether it exists. Another engine or data parallel "
        "rank with the same `local_disk` deleted it (the name of a chunk is the same for all), or something that "
        "cleans that folder.",
        now="a folder of its own for each engine: local_disk: file:///nvme/kv-0/; or max_local_disk_size larger than "
        "all that is kept, so that nothing is evicted; empty the folder and restart",
        good="folders that no two engines share; no release up to 0.5.6 asks for the file first",
        threads=("https://github.com/LMCache/LMCache/issues/1981",),
    ),
    Problem(
        code="KVD427",
        name="direct-io-not-aligned",
        severity=Severity.SLOW,
        title="Chunks are read and written through the page cache although use_odirect is set.",
        shows=(
            Logged(
                "Cannot use O_DIRECT for this file, size is not aligned to disk block size.",
                "lmcache/v1/storage_backend/local_disk_backend.py",
            ),
            Logged("Cannot use O_DIRECT for <path>, size is not aligned."),
            Logged("Cannot use O_DIRECT for writing size <size>, which is not aligned to block size"),
            Logged("Cannot use O_DIRECT for writing size <size>, not aligned to block size"),
        ),
        sentence="a chunk's size is not a multiple of the file system's block",
        connectors=_IN_PROCESS,
        cause="O_DIRECT needs a size that is a multiple of statvfs(local_disk).f_bsize: 4096 on ext4 and xfs, a "
        "megabyte and more on NFS or Lustre. Partial chunks (save_unfull_chunk) and such file systems miss it, and "
        "the file goes through the page cache. Releases before 0.3.9 log it also with use_odirect off: harmless.",
        now="save_unfull_chunk: false and a local_disk (fs://) on ext4 or xfs; or extra_config: {use_odirect: false}, "
        'for `lmcache server` "use_odirect": false in --l2-adapter; restart',
        good="keep it so: no release pads a chunk (0.5.6)",
        threads=(_LMCACHE + "issues/1570", _LMCACHE + "issues/1522"),
    ),
    Problem(
        code="KVD974",
        name="storage-folder-not-writable",
        severity=Severity.CRASH,
        title="LMCache may not write into the folder of its disk cache, and does not start.",
        shows=(
            Failed(kind="PermissionError", text="Permission denied: '<path>'", within="lmcache/"),
            Failed(kind="OSError", text="[Errno 30] Read-only file system: '<path>'", within="lmcache/"),
        ),
        sentence="{path} cannot be written",
        connectors=_IN_PROCESS,
        cause="The user of vLLM may not write to the folder of local_disk, gds_path or fs://: a volume that belongs to "
        "root while the container runs as another user, or one that is mounted read-only.",
        now="chown the folder to the user of vLLM (Kubernetes: securityContext.fsGroup), or another local_disk "
        "(LMCACHE_LOCAL_DISK=file:///tmp/lmcache/); restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD453",
        name="remote-store-without-mla",
        severity=Severity.SLOW,
        title="LMCache before 0.3 has no memory for chunks of an MLA model that come from a remote store.",
        shows=(
            Logged("Unsupported memory format: MemoryFormat.KV_MLA_FMT"),
            Failed(kind="ValueError", text="Unsupported memory format: MemoryFormat.KV_MLA_FMT"),
        ),
        sentence="the allocator refuses the format of MLA",
        releases={"lmcache": "<0.3.9"},
        replaces=("KVD302", "KVD877", "KVD1090"),
        cause="The allocator of the CPU buffer takes KV_2LTD only, so every load of a DeepSeek model from fs://, "
        "mooncakestore:// and the like fails. The files are whole: deleting them changes nothing.",
        now="pip install -U 'lmcache>=0.3.9'; until then local_cpu: true without remote_url",
        good="LMCache 0.3.9 or newer, whose allocator takes KV_MLA_FMT",
        threads=("https://github.com/LMCache/LMCache/issues/675",),
    ),
    Problem(
        code="KVD482",
        name="runtime-plugin-not-started",
        severity=Severity.SLOW,
        title="A script of runtime_plugin_locations could not be started.",
        shows=(
            Logged("Failed to launch plugin <path>: <error>"),
            Logged("Plugin location <path> does not exist"),
            Failed(kind="ValueError", text="No valid interpreter found for <path>"),
        ),
        sentence="{path}",
        cause="The path is not in this container, the file is not executable, or its first line names an interpreter "
        "that is not there (without one: python for .py, bash for .sh). The engine runs on without it.",
        now="ls -l on the path in the container, chmod +x, a first line `#!/usr/bin/env python3`",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
