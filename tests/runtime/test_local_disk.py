"""Test KVF037 and KVF038 on LMCache's own disk backend, with real files. Some files are short or cannot be written."""

import asyncio
import contextlib
import dataclasses
import os
import resource
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfix.fixes.lmcache import kvf037_truncated_chunk_file_is_loaded as kvf037
from kvfix.session import session
from tests.conftest import answers
from tests.runtime.test_collected_chunks import host_memory

CHUNKS = 3
BYTES = 2 * 2 * 16 * 16 * 4  # size of a chunk. A chunk fills one page, so the allocator does not round the size up


def key_of(chunk: int) -> Any:
    import torch
    from lmcache.utils import CacheEngineKey

    fields = {"fmt": "vllm", "model_name": "m", "world_size": 1, "worker_id": 0, "dtype": torch.float32}
    known = {field.name for field in dataclasses.fields(CacheEngineKey)}
    return CacheEngineKey(**{name: value for name, value in fields.items() if name in known}, chunk_hash=chunk)


class Disk:
    """LMCache's disk backend and CPU backend, with chunks 0, 1, 2. Each element of chunk n is n + 1."""

    def __init__(self) -> None:
        import lmcache.v1.memory_management as memory
        import lmcache.v1.storage_backend.local_disk_backend as module
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        folder = tempfile.mkdtemp(prefix="kvfix-test-")
        config = LMCacheEngineConfig.from_defaults(local_disk=folder, max_local_disk_size=1.0, cache_policy="LFU")
        with contextlib.suppress(ModuleNotFoundError):  # LMCache 0.3.9 has no module pin_monitor
            from lmcache.v1.pin_monitor import PinMonitor

            PinMonitor.GetOrCreate(config)
        self.allocator = host_memory()
        self.cpu = LocalCPUBackend(config, memory_allocator=self.allocator)
        self.backend = module.LocalDiskBackend(config, self._loop, self.cpu, dst_device="cpu")
        self._shape = torch.Size([2, 2, 16, 16]), torch.float32, memory.MemoryFormat.KV_2LTD
        self.keys = [key_of(chunk) for chunk in range(CHUNKS)]
        self._writes: list[Any] = []

        def submitted(task: Any, loop: Any) -> Any:
            self._writes.append(asyncio.run_coroutine_threadsafe(task, loop))
            return self._writes[-1]

        module.asyncio = SimpleNamespace(run_coroutine_threadsafe=submitted)

    def store(self, chunk: int) -> str:
        """Store the chunk. Return the write's error, "" if the write succeeded, or "not submitted" without a write."""
        memory = self.cpu.allocate(*self._shape)
        memory.tensor.fill_(chunk + 1)
        self.backend.submit_put_task(self.keys[chunk], memory)
        memory.ref_count_down()
        if not self._writes:
            return "not submitted"
        error = self._writes.pop().exception(60)
        return "" if error is None else type(error).__name__

    def path(self, chunk: int) -> Path:
        return Path(self.backend._key_to_path(self.keys[chunk]))

    def load(self, way: str) -> list[str]:
        """Load all chunks. Return "right" or "wrong" for each loaded chunk, and "none" for each missing chunk."""
        for key in self.keys:
            self.backend.pin(key)
        if way == "one by one":
            found = [self.backend.get_blocking(key) for key in self.keys]
        elif way == "batched":
            found = self.backend.batched_get_blocking(self.keys)
        else:
            load = self.backend.batched_get_non_blocking("lookup", self.keys)
            found = asyncio.run_coroutine_threadsafe(load, self._loop).result(60)
        for key in self.keys:
            self.backend.unpin(key)
        answers = []
        for chunk, memory in enumerate(found):
            right = memory is not None and bool((memory.tensor == chunk + 1).all())
            answers.append("none" if memory is None else "right" if right else "wrong")
            if memory is not None:
                if memory.is_pinned:
                    memory.unpin()
                memory.ref_count_down()
        return answers

    def state(self) -> list[Any]:
        """Return [known chunks, pins per chunk, number of allocations, [size, usage] in chunks, chunks with a file]."""
        backend = self.backend
        return [
            [self.keys.index(key) for key in backend.dict],
            [entry.pin_count for entry in backend.dict.values()],
            self.allocator.allocator.num_active_allocations,
            [int(backend.current_cache_size) / BYTES, backend.usage / BYTES],
            [chunk for chunk in range(CHUNKS) if self.path(chunk).exists()],
        ]


NEWEST = "0.5.6"
RIGHT, WRONG, NONE = ["right"] * 3, ["right", "wrong", "right"], ["right", "none", "right"]
LEFT, WHOLE = [[0, 2], [0, 0], 0, [2, 2], [0, 2]], [[0, 1, 2], [0, 0, 0], 0, [3, 3], [0, 1, 2]]
SIZES = [0, 1000, BYTES - 1, None, BYTES]  # bytes of chunk 1's file; None: the test deletes the file
GOOD, BAD, SHORT = [RIGHT, WHOLE, RIGHT], [WRONG, WHOLE, WRONG], [NONE, LEFT, RIGHT]
FIXED = {"one by one": SHORT, "batched": SHORT, "prefetched": [["right"], LEFT, RIGHT]}
RELEASED = {"one by one": "KeyError", "batched": [NONE, [*LEFT[:3], [3, 3], [0, 2]], RIGHT], "prefetched": "KeyError"}


@pytest.mark.parametrize(
    ("release", "fixes", "way", "answer"),
    [
        *(
            (name, ["KVF037"], way, [FIXED[way]] * 4 + [GOOD])
            for name in ("0.3.9.post1", "0.4.4", NEWEST)
            for way in FIXED
        ),
        *((NEWEST, False, way, [BAD] * 3 + [RELEASED[way], GOOD]) for way in FIXED),
    ],
)
@answers(also="release fixes answer")
def test_a_short_or_missing_file_is_no_chunk(way: str) -> list[Any]:
    """For each size of chunk 1's file, return a load's results, the state, and the results of a load after a store."""
    found: list[Any] = []
    for size in SIZES:
        disk = Disk()
        assert [disk.store(chunk) for chunk in range(CHUNKS)] == [""] * CHUNKS
        if size is None:
            disk.path(1).unlink()
        else:
            os.truncate(disk.path(1), size)
        try:
            first = disk.load(way)
        except KeyError as error:
            found.append(type(error).__name__)
            continue
        state = disk.state()
        disk.store(1)
        found.append([first, state, disk.load(way)])
    return found


@answers([["right", "wrong", "right"], [True], [0, 1, 2]], fixes=["KVF037"])
def test_a_load_by_layers_has_all_chunks_and_a_warning() -> list[Any]:
    """Load a layer's chunks, as `use_layerwise` does. Return results, True for each right warning, and known chunks."""
    disk = Disk()
    disk.keys = [key.split_layers(2)[1] for key in disk.keys]
    assert [disk.store(chunk) for chunk in range(CHUNKS)] == [""] * CHUNKS
    os.truncate(disk.path(1), 1000)
    loaded = disk.load("prefetched")
    reason = "is truncated or missing, and LMCache has loaded it (use_layerwise)"
    return [loaded, [reason in text for text in session.reported if "KVF037: " in text], disk.state()[0]]


@pytest.mark.parametrize(
    ("way", "answer"), [("one by one", ["none"] * 3), ("batched", ["none"] * 3), ("prefetched", [])]
)
@answers(also="answer", fixes=["KVF037"])
def test_a_fault_of_the_fix_is_no_chunk(way: str) -> list[str]:
    kvf037._MARK_BYTES = "a fault of kvfix"  # type: ignore[assignment]
    disk = Disk()
    for chunk in range(CHUNKS):
        disk.store(chunk)
    return disk.load(way)


@pytest.mark.parametrize(
    ("release", "fixes", "answer"),
    [
        ("0.4.3", False, [32, 16]),
        ("0.4.3", ["KVF037"], [16, 16]),
        ("0.3.9.post1", ["KVF037"], [16, 16]),
        ("0.4.4", ["KVF037"], [32, 32]),
    ],
)
@answers(also="release fixes answer")
def test_only_loaded_chunks_are_reported() -> list[int]:
    """Load three chunks. The last chunk is missing. Return the number of reported tokens, and of loaded tokens."""
    import lmcache.v1.cache_engine as module
    import torch

    chunks = [(16 * chunk, 16 * chunk + 16, key_of(chunk)) for chunk in range(CHUNKS)]
    memory = SimpleNamespace(get_size=lambda: 0)
    storage = SimpleNamespace(
        get_block_mapping=lambda infos: {"disk": infos}, batched_get=lambda keys, location: [memory, memory, None],
        contains=lambda key: "disk", non_allocator_backends=[],
    )  # fmt: skip
    engine = SimpleNamespace(
        storage_manager=storage, token_database=SimpleNamespace(process_tokens=lambda **_: chunks), lookup_pins={},
        lookup_cache={}, remove_after_retrieve=False,
    )  # fmt: skip
    reported = torch.zeros(48, dtype=torch.bool)
    loaded, _ = module.LMCacheEngine._process_tokens_internal(engine, None, None, reported)
    return [int(reported.sum()), sum(end - start for _, _, start, end in loaded)]


NOTHING, LEAKED, STORED = [[], [], 0, [0, 0], []], [[], [], 1, [1, 1], [0]], [[0], [0], 0, [1, 1], [0]]


@pytest.mark.parametrize("release", ["0.3.9", "0.4.4", "0.5.6"])
@pytest.mark.parametrize(
    ("fixes", "answer"),
    [(False, ["OSError", LEAKED, "not submitted", LEAKED]), (["KVF038"], ["OSError", NOTHING, "", STORED])],
)
@answers(also="fixes release answer")
def test_a_failed_write() -> list[Any]:
    """Let the write of chunk 0 fail after 100 bytes, then store chunk 0 with enough room. Return errors and states."""
    disk = Disk()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    error = disk.store(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return [error, disk.state(), disk.store(0), disk.state()]
