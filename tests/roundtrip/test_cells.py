from itertools import combinations, product
from unittest import mock

import pytest
import torch

from kvfix_tools.roundtrip import cuda_stand_in, element, region
from kvfix_tools.roundtrip.backends.torch_copy import IN_FLIGHT, CudaStream, TorchCopy, layers, paged
from kvfix_tools.roundtrip.cell_check import CellCheck, everywhere
from kvfix_tools.roundtrip.element import FIRST, Identity
from kvfix_tools.roundtrip.layout import DTYPES, LAYOUTS, Geometry
from kvfix_tools.roundtrip.matrix import AXES, Cell, pairs
from tests.roundtrip.test_planted_faults import ran

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CELLS = pairs("torch", AXES)


def every_identity(seed: int) -> torch.Tensor:
    """Return 16 words of 8 bytes per row. The rows cover 2 generations, 4 layers, K and V, 64 slots and 3 heads."""
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (2, 4, 2, 64, 3)))
    return element.rows(Identity(*grid.unbind(1), 0).number(), 16, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_decode_is_the_inverse_of_encode(seed: int) -> None:
    largest = Identity(*((1 << bits) - 1 for bits in element.BITS.values())).number()
    numbers = torch.cat([torch.arange(5000) * 1_000_003, torch.tensor([0, largest])])
    assert torch.equal(element.decode(element.encode(numbers.clone(), seed), seed), numbers)
    assert largest > 0
    who = Identity(2, 31, 1, 12345, 7, 63)
    assert Identity.of(who.number()) == who


def test_no_two_words_are_alike_and_a_seed_changes_all() -> None:
    words = every_identity(0)
    assert len(words.unique()) == words.numel()
    assert not bool((words == every_identity(1)).any())


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "uint8"])
def test_every_kind_of_float_occurs(name: str) -> None:
    """A comparison as floats would find -0.0 and 0.0 equal, and would find NaN different from NaN."""
    held = every_identity(0).view(DTYPES[name]).float()
    assert bool(held.isnan().any())
    assert bool((held < 0).any())
    if DTYPES[name].itemsize < 4:  # the sample is too small to have a -0.0 of four bytes
        assert bool(((held == 0) & held.signbit()).any())


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_lies_where_the_torch_backend_reads_it(name: str) -> None:
    heads = 1 if LAYOUTS[name].latent else 2
    geometry = Geometry(LAYOUTS[name], torch.float32, layers=3, blocks=5, block=4, heads=heads, head_size=8)
    cache = region.make("KV cache", geometry, geometry.layout.axes, [(geometry.sizes(), None)], CPU, seed=1)
    cache.fill(everywhere(FIRST))
    sizes = cache.geometry
    of_backend = [paged(tensor, sizes) for tensor in layers(cache.typed(), sizes)]
    for at in product(range(3), range(sizes.planes), range(5), range(4), range(sizes.heads)):
        layer, kv, block, offset, head = at
        number = torch.tensor([Identity(FIRST, layer, kv, block * 4 + offset, head, 0).number()])
        wanted = element.rows(number, sizes.row_words, cache.seed)[0]
        assert torch.equal(of_backend[layer][block, offset, kv, head], wanted), at


def test_every_pair_of_values_meets() -> None:
    for one, other in combinations(AXES, 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in CELLS}
        assert len(met) == len(AXES[one]) * len(AXES[other]), (one, other)
    assert len(CELLS) < 120
    assert pairs("torch", AXES) == CELLS


def test_the_torch_backend_passes() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = list(map(ran, CELLS))
    torch.set_num_threads(threads)
    assert [(result.cell, *map(str, result.findings)) for result in results if result.verdict != "passed"] == []
    for result in results:
        cell, (source, target) = result.cell, result.cell.mappings()
        assert len(set(source.tolist()) | set(target.tolist())) == 2 * cell.count  # source and target share no slot
        assert result.moved == cell.geometry().token_bytes(cell.count) > 0
        assert result.verified > 4 * result.moved  # a check verifies all KV and host memory more than once


def test_what_is_compared_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "AT_ONCE", 7)
    check = CellCheck(Cell("torch", layout="hnd", tokens="33"), CPU)
    assert check.run(TorchCopy(check)).verdict == "passed"


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", cuda_stand_in.CUDA.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)


def asked(stream: CudaStream) -> list[str]:
    return [name for name, _, _ in stream.native.method_calls]


def staged(copy: TorchCopy) -> TorchCopy:
    copy.streams = [CudaStream(CUDA) for _ in range(IN_FLIGHT)]
    copy.staging = [torch.empty_like(copy.buffers[0]) for _ in range(IN_FLIGHT)]
    return copy


@pytest.mark.parametrize("layout", ["nhd", "packed-hnd", "mla", "block-outermost"])
@pytest.mark.parametrize(("skip", "loads"), [("none", [2, 2]), ("chunk", [2, 1])])
def test_through_staging_buffers(layout: str, skip: str, loads: list[int]) -> None:
    """Each chunk's stream waits for the current stream. A store or a load waits for the work of all its streams."""
    check = CellCheck(Cell("torch", layout=layout, skip=skip), CPU)
    copy = staged(TorchCopy(check))
    assert [str(finding) for finding in check.run(copy).findings] == []
    for stream, chunks in zip(copy.streams, loads, strict=True):
        load = [*["wait_stream"] * chunks, "synchronize"]
        assert asked(stream) == ["wait_stream", "wait_stream", "synchronize", *load, *load]
        assert stream.kept == []


def test_a_staging_buffer_that_is_shared_by_mistake_is_found() -> None:
    """Plant this error: for the last chunk, the host gets the data that an earlier chunk left in the staging buffer."""

    class Stale(TorchCopy):
        def gather(self, number: int, slots: torch.Tensor) -> None:
            if len(slots) == self.chunk:
                super().gather(number, slots)
            else:
                self.buffers[number].copy_(self.staging[number % IN_FLIGHT][:, : len(slots)])

    check = CellCheck(Cell("torch"), CPU)
    assert set(check.run(staged(Stale(check))).findings[0].classes) == {"wrong slot"}


def test_a_race_orders_its_work_on_cuda_streams() -> None:
    """CudaStream waits for the current stream, which wrote the tensors. Host work waits for the stream's work."""
    stream, seen = CudaStream(CUDA), list[str]()
    stream.wait("event")
    stream.submit(lambda: seen.extend(asked(stream)), host=True)
    assert seen == ["wait_event", "synchronize"]
    slow, other = CudaStream(CUDA, slow=True), CudaStream(CUDA)
    done: list[str] = []
    slow.submit(lambda: done.append("slow"))
    other.wait(slow.record())
    other.submit(lambda: done.append("other"))
    assert done == ["slow", "other"]
    assert asked(slow) == ["wait_stream", "record_event"]
    assert asked(other) == ["wait_event", "wait_stream"]
    assert len(slow.kept) == len(other.kept) == 1
