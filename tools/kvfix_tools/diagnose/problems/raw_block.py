"""Raw block devices as a store: `rust_raw_block` in the engine, `raw_block` in the LMCache server."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_PLUGIN = "lmcache/v1/storage_backend/plugins/rust_raw_block_backend.py"
_L2 = "lmcache/v1/distributed/l2_adapters/raw_block_l2_adapter.py"
_FROM = "raw_block_l2_adapter.py:from_dict"
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
            Failed(kind="ValueError", text="raw block capacity too small for slot size after metadata"),
            Failed(kind="ValueError", text="metadata region exceeds usable device capacity"),
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
            Logged("RawBlockCore write failed for <key>: <error>"),
            Logged("RawBlockCore batched write failed: <error>"),
            Logged("RawBlockCore <kind> batch <batch> operation <number> failed: <error>"),
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
    Problem(
        code="KVD1612",
        name="raw-block-placement-refused",
        severity=Severity.CRASH,
        title="The server's raw block store is to place data by FDP, and the NVMe or the settings do not allow it.",
        shows=(
            Failed(kind="RuntimeError", text="raw_block FDP status query failed", at=_L2),
            Failed(kind="RuntimeError", text="raw_block FDP enabled but device returned no", at=_L2),
            Failed(kind="RuntimeError", text="raw_block FDP enabled but no non-zero data placement identifiers remain"),
            Failed(kind="RuntimeError", text="raw_block FDP placement identifier list is not reported by device"),
            Failed(kind="RuntimeError", text="raw_block metadata checkpoint placement identifier is not reported by"),
            Failed(kind="ValueError", text="fdp_enabled requires io_engine='io_uring' and use_uring_cmd=true", at=_L2),
            Failed(kind="ValueError", text="meta_checkpoint_placement_id requires io_engine='io_uring' and", at=_L2),
            Failed(kind="ValueError", text="fdp_placement_ids must not", at=_L2),
            Failed(kind="ValueError", text="fdp_placement_ids must be a list", at=_L2),
            Failed(kind="ValueError", text="meta_checkpoint_placement_id must not overlap with fdp_placement_ids"),
            Failed(kind="ValueError", text="fdp_data_placement_policy requires fdp_enabled=true", at=_L2),
            Failed(kind="ValueError", text="fdp_slot_reuse_policy requires fdp_enabled=true", at=_L2),
            Failed(kind="ValueError", text="fdp_data_placement_policy must be one of: <known>", at=_L2),
            Failed(kind="ValueError", text="fdp_slot_reuse_policy must be one of: <known>", at=_L2),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="FDP needs an NVMe with FDP switched on in its endurance group before the namespace is made, its "
        "character device (/dev/ng0n1), and io_uring commands. Identifiers are those that the device reports, without "
        "0; that of meta_checkpoint_placement_id is not one of fdp_placement_ids. Policies: none, cache_salt_prefix, "
        "cache_salt_rank; for slots none, pid_affinity.",
        now='"fdp_enabled": false in the adapter\'s JSON, without the other fdp_ keys; or "device_path": "/dev/ng0n1", '
        '"io_engine": "io_uring", "use_uring_cmd": true, and of `nvme fdp status /dev/nvme0n1` what it lists',
        good="placement only on a device whose `nvme fdp status` lists identifiers",
    ),
    Problem(
        code="KVD1614",
        name="l2-raw-block-settings-refused",
        severity=Severity.CRASH,
        title="The server refuses the settings of its raw block L2: the message names the key.",
        shows=(
            Failed(kind="ValueError", text="device_path must be a non-empty string", within=_FROM, at=_L2),
            Failed(kind="ValueError", text="per_tp_device_paths is not supported in MP raw_block mode", at=_L2),
            Failed(kind="ValueError", text="raw_block requires persist_enabled=true", at=_L2),
            Failed(kind="ValueError", text="slot_bytes must be a positive integer", at=_L2),
            Failed(kind="ValueError", text="slot_bytes must be >= header_bytes + 1", at=_L2),
            Failed(kind="ValueError", text="capacity_bytes must leave space for at least one slot", at=_L2),
            Failed(kind="ValueError", text="block_align must be > 0"),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="device_path and slot_bytes are needed. slot_bytes holds one chunk of all layers plus header_bytes "
        "(4096), rounded up to block_align; capacity_bytes is more than meta_total_bytes (256 MiB), or 0 for the whole "
        "device. persist_enabled is true, and per_tp_device_paths is of the store within the engine.",
        now='--l2-adapter \'{"type": "raw_block", "device_path": "/dev/nvme1n1", "slot_bytes": 33558528, '
        '"block_align": 4096}\' (slot_bytes for a chunk of 32 MiB), and --l1-align-bytes 4096; restart the server',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1784",
        name="raw-block-of-other-settings",
        severity=Severity.RISK,
        title="The raw block device was written with other settings: what is on it is not used.",
        shows=(Logged("Device metadata <what> mismatch; ignoring metadata"),),
        sentence="another {what} than at the last start",
        releases={"lmcache": ">=0.4.5"},
        cause="The header on the device names the geometry with which it was written, and this start has another: "
        "LMCache begins with an empty store, and writes over the old one.",
        now="block_align, header_bytes, slot_bytes, meta_total_bytes and device_path as they were, and restart, if the "
        "old chunks are wanted; else nothing",
        good="the same settings at each start; another model or chunk_size means another slot_bytes",
    ),
)
