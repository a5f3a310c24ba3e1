"""Test the audit, which compares a hit's KV with KV that vLLM computes. tests/engine/test_audit.py audits engines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvfix.connector_events import audit
from kvfix.connector_events.audit import Audit
from kvfix_tools.roundtrip.backends.torch_copy import paged
from kvfix_tools.roundtrip.layout import LAYOUTS, Geometry

LAYERS, BLOCKS, BLOCK, HEADS, WIDTH = 3, 5, 4, 2, 8
SLOTS = torch.tensor([7, 0, 19, 5, 12])
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]


def chunk(parts: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return KV in LMCache's layout: [parts, layers, tokens, heads * width]."""
    return torch.randn(parts, LAYERS, len(SLOTS), HEADS * WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def in_vllm(kv: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """Return vLLM's tensors with this KV in the slots SLOTS. The torch backend of `kvfix roundtrip` writes the KV."""
    heads = 1 if layout == "mla" else HEADS
    sizes = Geometry(LAYOUTS[layout], kv.dtype, LAYERS, BLOCKS, BLOCK, heads, HEADS * WIDTH // heads)
    caches = [torch.randn(sizes.tensor_shape()).to(kv.dtype) for _ in range(LAYERS)]
    rows = kv.unflatten(3, (heads, -1)).view(torch.int64).permute(1, 2, 0, 3, 4)
    for cache, layer in zip(caches, rows, strict=True):
        paged(cache, sizes)[SLOTS // BLOCK, SLOTS % BLOCK] = layer
    return [cache.transpose(1, 2) for cache in caches] if layout == "packed" else caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["packed-hnd", "packed", "nhd", "nhd-block-first", "mla"])
def test_the_audit_reads_the_slots_that_attention_reads(layout: str, dtype: torch.dtype) -> None:
    kv = chunk(1 if layout == "mla" else 2, dtype)
    caches = in_vllm(kv, layout)
    off, of = audit.difference_squares(kv, caches, SLOTS)
    assert off.shape == of.shape == (LAYERS, kv.shape[0], len(SLOTS))
    assert not off.any()
    assert torch.allclose(of, kv.float().square().sum(3).transpose(0, 1))
    kv[-1, 2, 3] += 1  # change the last part (V, or KV with MLA) of layer 2, token 3
    off, _ = audit.difference_squares(kv, caches, SLOTS)
    assert off.nonzero().tolist() == [[2, kv.shape[0] - 1, 3]]
    assert off[2, -1, 3].item() == pytest.approx(HEADS * WIDTH, rel=0.05)


NAN = float("nan")


@pytest.mark.parametrize(
    ("of", "off", "found", "is_wrong"),
    [
        (4.0, {}, (0, "K", 0, 0.0), False),
        (4.0, {"v1": 0.03}, (1, "V", 1, 0.05), False),  # error: sqrt(0.03 / (3 * 4))
        (4.0, {"v0": 0.48, "k1": 12.0}, (0, "V", 1, 0.2), True),  # the first layer above the limit, not the worst layer
        (4.0, {"k1": NAN}, (1, "K", 1, 1e9), True),
        (0.0, {"k1": 1.0}, (1, "K", 1, 1e9), True),
        (0.0, {}, (0, "K", 0, 0.0), False),
        (NAN, {"k1": NAN}, (0, "K", 0, 0.0), False),  # not wrong, because the KV that vLLM computed is NaN
    ],
)
def test_the_difference_is_a_share_of_the_norm(of: float, off: dict[str, float], found: Any, is_wrong: bool) -> None:
    """Compare a chunk of two layers. of: squared norm of each token. off: squared errors. "k0": K of layer 0."""
    squares = torch.zeros(2, 2, 3)
    for name, value in off.items():
        squares[int(name[1]), "kv".index(name[0]), 1] = value
    made = audit.largest(squares, torch.full((2, 2, 3), of), [0.1, 0.2])
    assert (*made[:3], pytest.approx(made.error), made.is_wrong) == (*found, is_wrong)


def test_one_part_is_mla() -> None:
    assert audit.largest(torch.ones(2, 1, 3), torch.ones(2, 1, 3), [0.1, 0.1]).part == "KV"


def test_limits_grow_with_the_type_and_the_depth() -> None:
    names = ["model.layers.0.attn", "model.layers.3.attn", "model.layers.15.attn"]
    assert audit.limits(names, torch.bfloat16) == [1 / 16, 1 / 8, 1 / 4]
    assert audit.limits(names, torch.float16) == [1 / 128, 1 / 64, 1 / 32]
    assert audit.limits(names, torch.float32) == audit.limits(names, torch.float16)
    assert audit.limits(["first", "second"], torch.bfloat16) == [1 / 16, 2**0.5 / 16]


def connector(**settings: Any) -> Any:
    role = settings.pop("kv_role", "kv_both")
    cache = SimpleNamespace(cache_dtype=settings.pop("cache_dtype", "auto"))
    impl = SimpleNamespace(config=SimpleNamespace(**settings), kv_role=role)
    return SimpleNamespace(_lmcache_engine=impl, _vllm_config=SimpleNamespace(cache_config=cache))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"remote_url": "redis://host", "remote_serde": "naive"}, ""),
        ({"remote_serde": "cachegen"}, ""),
        ({"remote_url": "redis://host", "remote_serde": "cachegen"}, "remote_serde=cachegen changes the stored KV"),
        ({"cache_dtype": "fp8_e4m3"}, "the KV cache is quantized (fp8_e4m3)"),
        ({"kv_role": "kv_consumer"}, "kv_role is kv_consumer, which stores nothing"),
        ({"use_layerwise": True}, "use_layerwise is set"),
        ({"enable_async_loading": True}, "enable_async_loading is set"),
    ],
)
def test_which_engines_are_audited(settings: dict[str, Any], reason: str) -> None:
    assert audit._reason(connector(**settings)) == reason


@pytest.mark.usefixtures("faults")
def test_another_connector_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert audit.begin(SimpleNamespace(), 0.5, "audit") is None
    assert caplog.messages == [
        "audit: hits of SimpleNamespace are not audited: "
        "the audit supports only LMCache in process (LMCacheConnectorV1)"
    ]


PACKED = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * WIDTH)


@pytest.mark.parametrize(
    ("held", "cache"),
    [
        (chunk()[:, :, :4], PACKED), (chunk().half(), PACKED), (None, PACKED), (chunk(), PACKED.to(torch.uint8)),
        (chunk(), PACKED.to(torch.float8_e4m3fn)), (chunk(), PACKED[:, :, 0, 0]),
    ],
    ids=["tokens", "type", "no tensor", "bytes", "float8", "layout"],
)  # fmt: skip
def test_kv_that_cannot_be_compared_ends_the_audit(
    held: Any, cache: torch.Tensor, faults: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    released: list[str] = []
    memory = SimpleNamespace(tensor=held, ref_count_down=lambda: released.append("chunk"))
    engine = SimpleNamespace(
        _is_passive=lambda: False,
        token_database=SimpleNamespace(process_tokens=lambda **_: [(0, 5, "key")]),
        storage_manager=SimpleNamespace(get=lambda key: memory),
    )
    impl = SimpleNamespace(lmcache_engine=engine, kv_caches=dict.fromkeys(NAMES, cache))
    found = Audit(SimpleNamespace(_lmcache_engine=impl), 1.0)
    meta = SimpleNamespace(req_id="r", token_ids=[1] * 5, slot_mapping=SLOTS, request_configs=None)
    for _ in range(2):
        assert found.compared([("r", 0, 5)], SimpleNamespace(requests=[meta])) == []
    assert (found.failed, released, faults) == (True, ["chunk"], {})
    (line,) = caplog.messages
    assert line.startswith("audit: this process compares no more hits: ")


def test_a_lookup_that_left_no_record_ends_the_audit_of_the_scheduler() -> None:
    found = Audit(SimpleNamespace(_lmcache_engine=SimpleNamespace(load_specs={}, _lmcache_chunk_size=4)), 1.0)
    with pytest.raises(KeyError):  # kvfix's wrapper around `miss` catches this error and keeps LMCache's answer
        found.miss("r", 8)
    assert not found.takes("r")
