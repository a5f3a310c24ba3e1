"""Raw block devices as a store: `rust_raw_block` in the engine, `raw_block` in the LMCache server."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_PLUGIN = "lmcache/v1/storage_backend/plugins/rust_raw_block_backend.py"
_CORE = "lmcache/v1/storage_backend/raw_block/core.py"

PROBLEMS = (
    Problem(
        code="KVD186",
        name="raw-block-device-not-configured",
        severity=Severity.CRASH,
        title="The raw block backend has no device of its own for this worker.",
        shows=(
            Failed(kind="ValueError", text="For TP > 1, rust_raw_block.per_tp_device_paths is required"),
            Failed(kind="ValueError", text="No device path configured for TP rank <rank>"),
            Failed(kind="ValueError", text="extra_config['rust_raw_block.device_path'] is required"),
            Failed(kind="ValueError", text="Duplicate device path configured in rust_raw_block.per_tp_device_paths"),
            Failed(kind="ValueError", text="RawBlockCore requires a non-empty device_path"),
        ),
        cause="Each worker writes to a device or file of its own: with one for two, each overwrites the other's "
        "chunks.",
        now="extra_config: {rust_raw_block.per_tp_device_paths: {0: /dev/nvme1n1, 1: /dev/nvme2n1}} (one rank: "
        "rust_raw_block.device_path: /dev/nvme1n1), and restart; what is on these devices is lost",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD187",
        name="raw-block-geometry-refused",
        severity=Severity.CRASH,
        title="The raw block store's sizes do not fit the device or each other.",
        shows=(
            Failed(kind="ValueError", text="block_align must be a power of 2"),
            Failed(kind="ValueError", text="header_bytes must be a multiple of block_align", at=_CORE),
            Failed(kind="ValueError", text="slot_bytes must be a multiple of block_align", at=_CORE),
            Failed(kind="ValueError", text="meta_total_bytes must be a multiple of block_align", at=_CORE),
            Failed(kind="ValueError", text="meta_total_bytes must provide room for metadata header", at=_CORE),
            Failed(kind="ValueError", text="use_uring_cmd requires"),
            Failed(kind="ValueError", text="raw_block requires l1_align_bytes >= block_align when use_odirect=true"),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="With O_DIRECT every buffer and every place on the device is a multiple of block_align (4096 on most "
        "NVMe). use_uring_cmd takes the NVMe's character device, /dev/ng0n1, and io_engine: io_uring.",
        now="block_align 4096, slot_bytes unset, and for the server --l1-align-bytes 4096; use_uring_cmd: false with "
        "/dev/nvme0n1; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD181",
        name="raw-block-extension-missing",
        severity=Severity.CRASH,
        title="The raw block store's Rust extension is not installed.",
        shows=(
            Failed(text="Rust raw-block extension is not installed."),
            Failed(kind="ModuleNotFoundError", text="No module named 'lmcache_rust_raw_block_io'"),
            Failed(kind="ModuleNotFoundError", text="No module named 'rust_raw_block_io'"),
        ),
        cause="It is no part of LMCache's wheel: it is built from the folder rust/raw_block of the sources.",
        now="git clone https://github.com/LMCache/LMCache && pip install maturin && pip install "
        './LMCache/rust/raw_block; or without it: local_disk: file:///mnt/nvme/kv/ (server: "type": "fs")',
        good="an image in which the extension was built",
    ),
    Problem(
        code="KVD182",
        name="raw-block-read-or-write-fails",
        severity=Severity.SLOW,
        title="The raw block device did not take or give a chunk.",
        shows=(
            Logged("RawBlockCore load failed for <key>: <error>"),
            Logged("RawBlockCore batched load failed: <error>"),
            Logged("RawBlockCore final checkpoint failed: <error>"),
            Failed(kind="RuntimeError", text="Failed to persist raw-block key <key>", at=_PLUGIN),
            Logged("RustRawBlockBackend: loaded metadata may belong to another worker", _PLUGIN),
            Logged("RawBlockCore: no free slot available for key"),
        ),
        releases={"lmcache": ">=0.4.5"},
        sure=False,
        cause="The error decides: errno 5 the device, 22 a size that is not aligned, 13 or 1 no rights on it "
        "(--device in Docker), a checksum: another process wrote there. `may belong to another worker`: ranks and "
        "devices were mixed up since the last start. `no free slot`: it is full of chunks that are pinned.",
        now="ls -l on the device in the container, dmesg -T; one device for each worker in the order of the last "
        "start; `blkdiscard DEVICE` for a fresh start (all on it is lost)",
        good="a device that no one else uses",
    ),
)
