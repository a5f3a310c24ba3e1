"""GPUDirect Storage: cuFile and its like, and the chunks' files in gds_path."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_GDS = "lmcache/v1/storage_backend/gds_backend.py"
PROBLEMS = (
    Problem(
        code="KVD262",
        name="gds-file-too-short",
        severity=Severity.SLOW,
        title="A chunk's file in gds_path is shorter than the chunk: it is computed again.",
        shows=(
            Logged(
                "Error loading <path>: got only <bytes> bytes out of <size>, ignoring",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
            Logged(
                "File <path> is too small: size=<size>, but need at least <bytes>",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="The file was written by a process that died meanwhile, by one with another chunk_size or dtype, or the "
        "disk was full.",
        now="stop the engine, empty gds_path, start it; df -h on it",
        good="a folder of its own for each model, dtype and chunk_size",
    ),
    Problem(
        code="KVD263",
        name="gds-metadata-of-another-release",
        severity=Severity.SLOW,
        title="Files in gds_path are of another release of LMCache.",
        shows=(
            Logged("Unsupported metadata version for <path>", "lmcache/v1/storage_backend/gds_backend.py"),
            Logged(
                "Failed to read metadata file <path> during GDS start; raising the error to fail startup",
                "lmcache/v1/storage_backend/gds_backend.py",
            ),
        ),
        releases={"lmcache": ">=0.5"},
        cause="Each file has its metadata in front, in a version of its own. Those of another version are left out; "
        "a file that cannot be read at all ends the start.",
        now="empty gds_path, or name another folder for this release",
        good="a folder for each release",
    ),
    Problem(
        code="KVD894",
        name="gds-write-fails",
        severity=Severity.SLOW,
        title="GPUDirect Storage cannot write or read chunks on this file system.",
        shows=(
            Logged("GDS write operation failed for key <key> at path"),
            Logged("GDS/cuFile write operation failed for key <key> at path"),
            Logged("GDS read failed for <path>: "),
            Logged("error creating udev_device for block device dev_no: <device>"),  # of cufile.log
            Logged("CuFile read failed for <path>: "),
            Logged("Error saving <path>: "),
            Logged("Error loading <path>: ret: "),
            Failed(kind="RuntimeError", text="cuFileHandleRegister failed (cuFile err="),
            Failed(kind="RuntimeError", text="cuFileWrite failed (cuFile err="),
            Failed(kind="RuntimeError", text="cuFileRead failed (cuFile err="),
        ),
        connectors=_IN_PROCESS,
        cause="cuFile refuses the file system (overlay, NFS without RDMA, tmpfs), nvidia-fs is not loaded, or the "
        "folder is full or read-only: the error at the end says which. cuFile's numbers: 5001 no driver, 5007 and 5008 "
        "platform or file system, 5010 and 5033 nvidia-fs, 5018 to 5020 kind or mode of the file, 5030 within cuFile.",
        now="extra_config: {use_cufile: false} (LMCache 0.4.4 and newer: use_gds: false), which reads and writes "
        "through the page cache; /usr/local/cuda/gds/tools/gdscheck -p",
        good="a file system that gdscheck lists as supported; else local_disk",
        sure=False,
    ),
    Problem(
        code="KVD895",
        name="gds-not-there",
        severity=Severity.CRASH,
        title="The GDS backend does not start: cuFile, its folder or its file system does not fit.",
        shows=(
            Failed(kind="RuntimeError", text="Unable to detect fstype for <path>", at=_GDS),
            Failed(kind="AssertionError", text="Need to specify gds_path for GdsBackend", at=_GDS),
            Failed(kind="ModuleNotFoundError", text="No module named 'cufile'"),
            Failed(kind="OSError", text="libcufile.so"),
            Logged("Unable to detect fstype for"),
        ),
        connectors=_IN_PROCESS,
        cause="The text says which: gds_path is not an absolute path on a mounted file system, the Python package "
        "cufile-python is missing, or NVIDIA's libcufile is not in the container.",
        now="pip install cufile-python and the package libcufile-dev of this CUDA, gds_path: /mnt/nvme/kv; or without "
        "gds_path and local_disk: /mnt/nvme/kv",
        good="keep it so: the set-up was wrong, and no release changes that",
        threads=(_LMCACHE + "issues/795",),
    ),
    Problem(
        code="KVD859",
        name="gds-without-gpu-runtime",
        severity=Severity.CRASH,
        title="The GDS backend without GDS copies by the GPU's runtime library, and does not find it.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="GDS POSIX fallback requires a GPU runtime library (libcudart.so or libamdhip64.so)",
                at=_GDS,
            ),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.5.2"},
        cause="With use_gds: false, or on tmpfs and overlayfs, files are read by the CPU and copied with cudaMemcpy. "
        "libcudart.so is looked for on the loader's path, where torch's own copy (site-packages/nvidia) is not.",
        now="find / -name 'libcudart.so*': its folder into LD_LIBRARY_PATH, with a link libcudart.so in it; or "
        "local_disk: in place of gds_path:",
        good="an image with the CUDA runtime (`-runtime` or `-devel`), not `-base`",
    ),
    Problem(
        code="KVD896",
        name="cufile-aborts",
        severity=Severity.CRASH,
        title="NVIDIA's cuFile library aborts the LMCache server in an asynchronous read.",
        shows=(
            Died(within="read_async"),
            Died(within="cuFileReadAsync"),
            Died("putStreamOp"),
        ),
        sentence="an assertion in libcufile ended the process",
        releases={"lmcache": ">=0.4.7"},
        cause="The library asserts in its own queue of stream operations while many reads of a retrieve are queued; "
        "the code is not LMCache's. Workers see time-outs only.",
        now="restart the server without --gds-l1-path: lmcache server --l1-size-gb 50 --eviction-policy LRU, then vLLM",
        good="no release is right yet; LMCache 0.5.6 can take another --gds-l1-backend",
        sure=False,
        threads=(_LMCACHE + "issues/4589",),
    ),
    Problem(
        code="KVD970",
        name="gds-call-refused",
        severity=Severity.SLOW,
        title="NVIDIA's cuFile or AMD's hipFile refuses a call of the LMCache server's GDS tier.",
        shows=(
            Failed(kind="RuntimeError", text="<call> failed: cuFileError(err=<error>"),
            Failed(kind="RuntimeError", text="<call> failed: hipFileError(err=<error>"),
        ),
        sentence="{call}: error {error}",
        releases={"lmcache": ">=0.4.7"},
        sure=False,
        cause="The message has the library's own code. GPU direct storage needs its kernel module (nvidia-fs), a file "
        "system that it supports (ext4 and xfs on NVMe; no overlay, no tmpfs) and its devices in the container.",
        now="/usr/local/cuda/gds/tools/gdscheck -p on the node and in the container; lmcache server without "
        "--gds-l1-path until it passes",
        good="GDS set up on the node, or the server's L1 in host memory (--l1-size-gb)",
    ),
    Problem(
        code="KVD1628",
        name="gds-metadata-not-written",
        severity=Severity.SLOW,
        title="The GDS backend cannot write the small file with a chunk's metadata: the chunk is dropped.",
        shows=(
            Logged("Metadata write task failed for key <key> at path <path>: <error>"),
            Logged("POSIX metadata write operation failed for key <key> at path <path>: "),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.3"},
        sure=False,
        cause="The chunk itself was written by GDS; its metadata goes through the page cache, and that write failed "
        "with the error at the end: no space or no inodes left, a folder that another has removed, no rights. The "
        "chunk's file stays on the disk and no one finds it.",
        now="df -h and df -i on gds_path; ls -ld it; empty it where another process cleans there, and restart",
        good="a folder of its own with room for gds_path",
    ),
    Problem(
        code="KVD1630",
        name="gds-copy-by-runtime-fails",
        severity=Severity.SLOW,
        title="The GDS backend's copy between GPU and page cache fails.",
        shows=(
            Failed(kind="RuntimeError", text="GPU memcpy failed with code <code>", at=_GDS),
            Failed(kind="RuntimeError", text="GPU memcpy failed <code>", at=_GDS),
        ),
        sentence="cudaMemcpy answers {code}",
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.5.2"},
        sure=False,
        cause="Without GDS the backend calls cudaMemcpy of the libcudart that it finds. CUDA's numbers: 35: that "
        "library is newer than the driver; 100, 101: no such device; 1: a file that is shorter than its chunk or a "
        "buffer that is gone; 700 and above: the GPU had failed before, see the lines above.",
        now="35: the libcudart of torch's CUDA first in LD_LIBRARY_PATH (nvidia-smi shows the driver's CUDA); 1: empty "
        "gds_path; else local_disk: in place of gds_path:, and restart",
        good="one CUDA in the container, not newer than the driver's",
    ),
    Problem(
        code="KVD1668",
        name="weka-without-gds",
        severity=Severity.CRASH,
        title="gds_path is on WekaFS, and use_gds is off.",
        shows=(Failed(kind="AssertionError", source="assert self.use_gds", at=_GDS),),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.4.4"},
        cause="On wekafs the backend goes by GDS only; the fallback through the page cache is for other file systems.",
        now="use_gds: true (LMCACHE_USE_GDS unset), with nvidia-fs loaded; without GDS local_disk: in place of "
        "gds_path:, and restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
