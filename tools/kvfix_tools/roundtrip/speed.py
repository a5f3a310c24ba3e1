"""GB/s each way, and of a plain pinned copy of the same bytes in the same run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.cell_check import CellCheck, Refused, Result, everywhere, seconds
from kvfix_tools.roundtrip.element import SECOND, WORD
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.region import BAND

#: Sizes of a model of 8 billion parameters: 128 KiB of KV for a token in bfloat16.
MODEL = {"dtype": "bfloat16", "heads": "8", "layers": 32, "head_size": 128, "block": "16", "chunk": "256"}
DEFAULT_GIB = {"cpu": 1 / 32, "cuda": 4.0}
REPEATS = 3


def measure(backend: Backend, device: torch.device, gib: float | None, seed: int) -> Result:
    """One large transfer of a backend, verified as every cell is; the fastest of a few of each way, and of plain copies
    of as many bytes."""
    cell = Cell(backend.name, layout="nhd", slots="blocks", seed=seed, **MODEL)  # type: ignore[arg-type]
    wanted, chunk = (DEFAULT_GIB[device.type] if gib is None else gib) * (1 << 30), int(cell.chunk)
    # With its guard bands: pinned memory is taken in powers of two.
    chunks = max(1, int(wanted // (cell.geometry().token_bytes(chunk) + 2 * BAND * WORD)))
    cell = replace(cell, tokens=str(chunks * chunk))
    try:
        check = CellCheck(cell, device)
        transfer = backend.open(check)
        check.prepare(transfer)
        check.cache.fill(everywhere(SECOND))  # another generation, which is not looked at
        for _ in range(REPEATS):
            check.store(transfer)
            check.load(transfer)
        start = time.perf_counter()
        result = check.run(transfer, brief=True)
        result.check_seconds = time.perf_counter() - start
        del check, transfer  # their memory
    except (Refused, NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        return Result(cell, "refused", reason=str(error))
    result.plain_store, result.plain_load = plain(result.moved, device)
    return result


@functools.lru_cache(maxsize=512)
def plain(size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one plain copy of so many bytes to pinned memory, and of one back: measured once in a run."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return (
        fastest(lambda: on_host.copy_(on_device, non_blocking=True), device),
        fastest(lambda: on_device.copy_(on_host, non_blocking=True), device),
    )


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds; the first run is not counted."""
    return min([seconds(work, device) for _ in range(REPEATS + 1)][1:])
