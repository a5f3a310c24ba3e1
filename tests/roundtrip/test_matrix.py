"""The cells that are run, and that the torch backend passes them all."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
import torch

from kvfix_tools.roundtrip import backends, region
from kvfix_tools.roundtrip.backends.torch_copy import TorchCopy
from kvfix_tools.roundtrip.cell_check import CellCheck
from kvfix_tools.roundtrip.command import run_cell
from kvfix_tools.roundtrip.matrix import AXES, Cell, full, pairs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_pair_of_values_meets() -> None:
    cells = pairs("torch", AXES)
    for one, other in combinations(AXES, 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert len(met) == len(AXES[one]) * len(AXES[other]), (one, other)
    assert len(cells) < 120
    assert cells == pairs("torch", AXES)


def test_full_is_every_combination() -> None:
    axes = {name: values[:2] for name, values in AXES.items()}
    assert len(set(full("torch", axes))) == prod(len(values) for values in axes.values())


@pytest.mark.parametrize("cell", pairs("torch", AXES), ids=str)
def test_source_and_target_have_no_slot_in_common(cell: Cell) -> None:
    source, target = cell.mappings()
    assert len(set(source.tolist()) | set(target.tolist())) == 2 * cell.count
    assert int(torch.cat([source, target]).max()) < cell.geometry().slots


def test_the_torch_backend_passes() -> None:
    [torch_copy] = backends.named(["torch"])
    results = [run_cell(torch_copy, cell, CPU) for cell in pairs("torch", AXES)]
    wrong = [
        (result.cell, result.reason, *map(str, result.findings)) for result in results if result.verdict != "passed"
    ]
    assert wrong == []
    for result in results:
        assert result.moved == result.cell.geometry().token_bytes(result.cell.count) > 0
        assert result.verified > 4 * result.moved  # the whole KV cache and the host, more than once


def test_what_is_compared_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large regions are looked at in parts."""
    monkeypatch.setattr(region, "AT_ONCE", 7)
    check = CellCheck(Cell("torch", layout="hnd", tokens="33"), CPU)
    assert check.run(TorchCopy(check)).verdict == "passed"
