"""GB/s each way, beside a plain pinned copy of the same bytes in the same run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip.backend import Backend
from kvfix_tools.roundtrip.cell import Cell
from kvfix_tools.roundtrip.element import WORD
from kvfix_tools.roundtrip.region import BAND
from kvfix_tools.roundtrip.trip import Refused, Result, Trip

#: Sizes of a model of 8 billion parameters: 128 KiB of KV for a token in bfloat16.
MODEL = {"dtype": "bfloat16", "heads": "8", "layers": 32, "head_size": 128, "block": "16", "chunk": "256"}
DEFAULT_GIB = {"cpu": 1 / 32, "cuda": 4.0}
REPEATS = 3


class Speed(NamedTuple):
    """Bytes a second. `seconds`: one whole check of these bytes, filling and verifying included."""

    result: Result
    store: float
    load: float
    plain_store: float
    plain_load: float
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return {
            "backend": self.result.cell.backend, "verdict": self.result.verdict, "reason": self.result.reason,
            "bytes": self.result.moved, "store_gb_s": self.store / 1e9, "load_gb_s": self.load / 1e9,
            "plain_store_gb_s": self.plain_store / 1e9, "plain_load_gb_s": self.plain_load / 1e9,
            "check_seconds": self.seconds, "command": self.result.cell.command("--gib 0"),
        }  # fmt: skip


def measure(backend: Backend, device: torch.device, gib: float | None, seed: int) -> Speed:
    """One large transfer of a backend, verified as every cell is; the fastest of a few of each way."""
    cell = Cell(backend.name, layout="nhd", slots="blocks", seed=seed, **MODEL)  # type: ignore[arg-type]
    wanted, chunk = (DEFAULT_GIB[device.type] if gib is None else gib) * (1 << 30), int(cell.chunk)
    # With its guard bands: pinned memory is taken in powers of two.
    chunks = max(1, int(wanted // (cell.geometry().token_bytes(chunk) + 2 * BAND * WORD)))
    cell = replace(cell, tokens=str(chunks * chunk))
    try:
        trip = Trip(cell, device)
        transfer = backend.open(trip)
        trip.prepare(transfer)
        for _ in range(REPEATS):
            trip.time_both(transfer)
        start = time.perf_counter()
        result = trip.run(transfer, brief=True)
        seconds = time.perf_counter() - start
        del trip, transfer  # their memory
    except (Refused, NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        return Speed(Result(cell, "refused", reason=str(error)), 0, 0, 0, 0, 0)
    there, back = (result.moved / taken for taken in plain(result.moved, device))
    return Speed(result, result.moved / result.store, result.moved / result.load, there, back, seconds)


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
    taken = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
