from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvfix_tools.roundtrip import backends, races
from kvfix_tools.roundtrip.backends.torch_copy import TorchCopy, paged
from kvfix_tools.roundtrip.cell_check import CellCheck, Result
from kvfix_tools.roundtrip.command import check_cell
from kvfix_tools.roundtrip.element import WORD
from kvfix_tools.roundtrip.layout import DTYPES, LAYOUTS
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.planted_faults import FAULTS
from kvfix_tools.roundtrip.region import Region

CPU = torch.device("cpu")
SOME = [("layout", "nhd"), ("layout", "packed-hnd"), ("layout", "block-outermost")]
SOME += [("dtype", name) for name in DTYPES]
#: The expected kind of finding for each race in races.py, if the race runs without CUDA events.
WITHOUT = {
    "late-producer": "stale",
    "early-reuse": "overwritten",
    "neighbours": "not written",
    "many-in-flight": "not written",
    "buffer-taken-again": "overwritten",
}


def ran(cell: Cell, fault: str | None = None) -> Result:
    [torch_copy] = backends.named(["torch"])
    return check_cell(torch_copy, fault, CPU, Result(cell))


@pytest.mark.parametrize(("axis", "value"), SOME)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "missing-event"])
def test_a_fault_is_named(fault: str, axis: str, value: str) -> None:
    """A word of eight bytes encodes its own position. With an 8-bit dtype, eight elements form one word."""
    result = ran(Cell("torch", **{axis: value}), fault)
    assert result.verdict == "failed"
    assert {kind for finding in result.findings for kind in finding.classes} == {FAULTS[fault]}


def test_a_finding_names_the_content_of_a_slot() -> None:
    result = ran(Cell("torch", slots="contiguous", tokens="3", heads="1", layers=5), "wrong-layer")
    assert result.findings[1].first == (
        "wrong layer: layer 0 K, slot 19 holds layer 1 K, slot 16; it should hold layer 0 K, slot 16"
    )
    assert result.findings[1].words * WORD == result.moved
    assert "of an earlier generation; it should hold layer" in ran(Cell("torch"), "stale").findings[-1].first
    last = int(Cell("torch").mappings()[0][-1])
    beside = ran(Cell("torch"), "neighbour-write").findings[-1].first
    assert f", slot {last}, head 0; it should hold the poison" in beside


def classes(copy: type[TorchCopy], **cell: str) -> dict[str, set[str]]:
    """Check a cell with `copy` in place of TorchCopy. Return the error classes of each finding, by stage."""
    check = CellCheck(Cell("torch", **cell), CPU)
    return {finding.stage: set(finding.classes) for finding in check.run(copy(check)).findings}


def spoiled(move: str, spoil: Callable[[Region, Region], object]) -> type[TorchCopy]:
    class Spoiled(TorchCopy):
        def __init__(self, check: CellCheck) -> None:
            super().__init__(check)
            moves = getattr(self, move)
            setattr(self, move, lambda *arguments: (moves(*arguments), spoil(check.cache, self.host)))

    return Spoiled


def test_k_and_v_swapped_both_ways() -> None:
    """The check shares no code with the copy. So the check finds errors of store and load that cancel each other."""

    class Swapped(TorchCopy):
        def gather(self, number: int, slots: torch.Tensor) -> None:
            super().gather(number, slots)
            self.buffers[number].copy_(self.buffers[number].flip(2))

        def scatter(self, number: int, slots: torch.Tensor, skip: int) -> None:
            self.buffers[number].copy_(self.buffers[number].flip(2))
            super().scatter(number, slots, skip)
            self.buffers[number].copy_(self.buffers[number].flip(2))

    assert classes(Swapped) == {"store, host": {"K and V swapped"}, "load, KV cache": {"K and V swapped"}}


def test_the_other_layout_of_the_same_shape() -> None:
    """In LMCache issue 4463, no property of the tensor tells the two layouts apart."""

    class Mistaken(TorchCopy):
        def __init__(self, check: CellCheck) -> None:
            super().__init__(check)
            inside = check.geometry._replace(layout=LAYOUTS["kv-inside"])
            self.layers = [paged(tensor, inside) for tensor in check.cache.typed()]

    found = classes(Mistaken, layout="packed", heads="2")
    assert found == {"store, host": {"misplaced"}, "load, KV cache": {"misplaced"}}


@pytest.mark.parametrize(
    ("move", "spoil", "stage", "kind"),
    [
        ("store", lambda cache, host: cache.words[:1].zero_(), "store, KV cache", "source changed"),
        ("store", lambda cache, host: cache.tensors()[0][0].zero_(), "store, KV cache", "source changed"),
        ("store", lambda cache, host: host.words[-1:].zero_(), "store, host", "guard band written"),
        ("load", lambda cache, host: cache.words[:1].zero_(), "load, KV cache", "guard band written"),
    ],
    ids=["in front of the KV cache", "in it", "behind the host buffers", "in front of a tensor"],
)
def test_a_move_that_writes_elsewhere(move: str, spoil: Any, stage: str, kind: str) -> None:
    found = classes(spoiled(move, spoil))
    assert found[stage] == {kind}
    assert move == "load" or len(found) == 1


def test_rows_shifted_by_a_byte() -> None:
    def crooked(cache: Region, host: Region) -> None:
        for rows in host.tensors():
            held = rows.view(torch.uint8).flatten()
            held.copy_(held.roll(3))

    found = classes(spoiled("store", crooked))["store, host"]
    assert "shifted by bytes" in found
    assert found <= {"shifted by bytes", "unknown"}  # roll() moves bytes of the last word into the first word


@pytest.mark.parametrize(("name", "kind"), WITHOUT.items())
def test_with_its_events_it_is_sound_and_without_it_is_found(name: str, kind: str) -> None:
    """On the CPU the streams of a race are queues of deferred work. So the race notices a missing event every time."""
    assert races.run(name, Cell("torch"), CPU).findings == []
    [finding] = races.run(name, Cell("torch"), CPU, events=False).findings
    assert set(finding.classes) == {kind}


def test_a_hostile_write_to_a_slot_that_is_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = TorchCopy.scatter

    def and_one_more(copy: TorchCopy, *more: Any) -> None:
        scatter(copy, *more)
        copy.layers[1][0, 0] = 0

    monkeypatch.setattr(TorchCopy, "scatter", and_one_more)
    [finding] = races.run("neighbours", Cell("torch", slots="contiguous"), CPU).findings
    assert set(finding.classes) == {"unknown"}
