"""Compare the cached KV of a fraction of all hits with KV that vLLM computes (`audit=0.001`).

The scheduler and the worker choose the same requests, because both choose by a hash of the request id.

- For a chosen request, kvfix makes the connector report a hit of 0 tokens. kvfix also changes LMCache's state of the
  request, as if the cache had no more tokens than vLLM. So vLLM computes the tokens. The worker releases the pins of
  the lookup and stores the chunks again. LMCache's disk or remote cache may write a chunk that it already has.
- Before this store, the worker compares each chunk in the cache with the KV that vLLM has computed. kvfix reads vLLM's
  tensors without LMCache's code, because a bug in that code (KVF020) would affect both sides of the comparison.

The audit copies no chunk from the cache into vLLM's blocks, so the audit cannot find bugs in LMCache's code for loads.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvfix import applying, engine_log, metrics
from kvfix.engine_state.reader import Span
from kvfix.ledger.events import Compared
from kvfix.wrapping import after

#: Name of the attribute in which a connector keeps its Audit.
_HELD = "_kvfix_audit"
#: Settings that make LMCache store or load in a way that the audit does not support.
_OTHER_WAYS = ("use_layerwise", "enable_blending", "enable_async_loading", "enable_pd")
#: The values of vLLM's `cache_dtype` with which the KV cache is not quantized.
_EXACT = ("auto", "half", "float16", "bfloat16", "float", "float32")
#: `Difference.error` is _NO_NUMBER if the cached KV is not finite, or if vLLM's KV is zero and the cached KV is not.
_NO_NUMBER = 1e9


class NotAudited(Exception):
    """Raised if kvfix cannot audit hits of this engine. The text of the exception says why."""


class Audit:
    """The audit of one connector. The audit keeps no data of requests."""

    def __init__(self, connector: Any, fraction: float) -> None:
        self.impl = connector._lmcache_engine
        #: True after an error: this connector is no longer audited.
        self.failed = False
        self._below = fraction * 2**32

    def takes(self, request: str) -> bool:
        return not self.failed and zlib.crc32(request.encode()) < self._below

    def miss(self, request: str, computed: int) -> None:
        """Change LMCache's load spec of this request to the load spec of a miss."""
        chunk = self.impl._lmcache_chunk_size
        try:
            self.impl.load_specs[request].lmcache_cached_tokens = computed // chunk * chunk
        except Exception:
            self.failed = True
            raise

    def compared(self, stores: Iterable[Span], metadata: Any) -> list[Compared]:
        """Compare cached chunks with vLLM's KV, for the tokens that this step is going to store. Never raise."""
        try:
            starts = {name: start for name, start, _ in stores if self.takes(name)}
            metas = [meta for meta in metadata.requests if meta.req_id in starts] if starts else []
            return [each for meta in metas if (each := self._compare(meta, starts[meta.req_id])) is not None]
        except NotAudited as reason:
            engine_log.warning(f"audit: this process compares no more hits: {reason}")
        except Exception as error:  # noqa: BLE001
            engine_log.fault("kvfix.connector_events.audit", error)
        self.failed = True
        return []

    def _compare(self, meta: Any, start: int) -> Compared | None:
        """Compare the chunks from token `start` on, up to the first chunk that the cache does not have."""
        engine, caches = self.impl.lmcache_engine, self.impl.kv_caches
        if engine is None or engine._is_passive() or len(meta.token_ids) != len(meta.slot_mapping):
            return None
        chunks: list[tuple[Difference, int, int]] = []
        keys = engine.token_database.process_tokens(tokens=meta.token_ids, request_configs=meta.request_configs)
        for first, last, key in keys:
            if first < start:
                continue
            held = engine.storage_manager.get(key)
            if held is None:
                break
            try:
                squares = difference_squares(held.tensor, list(caches.values()), meta.slot_mapping[first:last])
                chunks.append((largest(*squares, limits(list(caches), held.tensor.dtype)), first, last))
            finally:
                held.ref_count_down()
        if not chunks:
            return None
        metrics.audited(len(chunks))
        wrong = [each for each in chunks if each[0].is_wrong]
        shown, first, last = wrong[0] if wrong else max(chunks, key=lambda each: each[0].error / each[0].limit)
        layer, token = list(caches)[shown.layer], first + shown.token
        return Compared(
            meta.req_id, len(chunks), len(wrong), first, last, layer, shown.part, token, shown.error, shown.limit
        )


class Difference(NamedTuple):
    """The difference between LMCache's and vLLM's K or V, for a chunk and layer. `Compared` explains the fields."""

    layer: int  # index of the layer in vLLM's order
    part: str
    token: int  # counted from the start of the chunk
    error: float
    limit: float

    @property
    def is_wrong(self) -> bool:
        return self.error > self.limit


def largest(off: Any, of: Any, limits: Sequence[float]) -> Difference:
    """Return the first difference above its limit, or else the difference that is nearest to its limit.

    off, of: the results of `difference_squares`.
    """
    parts, computed = off.shape[1], of.sum(2)
    is_right = (off.sum(2) == 0) | ~computed.isfinite()  # infinite KV is an error of the model, not of the cache
    norms = (off.sum(2) / computed).sqrt().masked_fill(is_right, 0)
    errors = norms.nan_to_num(nan=_NO_NUMBER, posinf=_NO_NUMBER).flatten().tolist()
    shares = [error / limits[number // parts] for number, error in enumerate(errors)]
    number = next((at for at, share in enumerate(shares) if share > 1), shares.index(max(shares)))
    layer, part = divmod(number, parts)
    token = int(off[layer, part].nan_to_num(nan=_NO_NUMBER).argmax())
    return Difference(layer, "KV" if parts == 1 else "KV"[part], token, errors[number], limits[layer])


def limits(names: Sequence[str], dtype: Any) -> list[float]:
    """Return for each layer the largest relative difference that rounding explains: 8 * eps * sqrt(layer + 1).

    One rounding causes an error of at most eps / 2. A layer rounds about eight times: norm, QKV, rotary embedding,
    attention, projection, twice in the MLP, residual. The squares of independent errors add up. So the KV of a layer
    has an error of eps / 2 * sqrt(8 * (layer + 1)). Two computations of the KV differ by sqrt(2) times this error. The
    limit is four times this difference, because weights amplify errors. Unrelated KVs of equal norm differ by sqrt(2).
    """
    import torch

    eps = max(torch.finfo(dtype).eps, 2.0**-10)  # a GPU may compute float32 in TF32
    found = [re.search(r"\.(\d+)\.", name) for name in names]
    depths = [int(match[1]) if match else number for number, match in enumerate(found)]
    return [8 * eps * (depth + 1) ** 0.5 for depth in depths]


def difference_squares(held: Any, caches: Sequence[Any], slots: Any) -> tuple[Any, Any]:
    """Return the squared norms of (cached KV - vLLM's KV) and of vLLM's KV, each as [layers, parts, tokens].

    held: the chunk in the cache [parts, layers, tokens, width]. caches: vLLM's tensor of each layer. slots: the slots
    of the chunk's tokens. The parts are K and V; MLA has one part.
    """
    import torch

    slots = slots.to(caches[0].device)
    rows = []
    for layer, cache in enumerate(caches):
        computed = _computed(cache, slots)
        if held is None or held.ndim != 4 or held[:, layer].shape != computed.shape or held.dtype != computed.dtype:
            raise NotAudited(f"the cached chunk is {_kind(held)}, but vLLM's KV is {_kind(cache)}")
        there = held[:, layer].to(computed.device).float()
        computed = computed.float()
        rows.append(torch.stack([(there - computed).square().sum(2), computed.square().sum(2)]))
    off, of = torch.stack(rows, dim=1).cpu()  # `.cpu()` waits for the device
    return off, of


def _computed(cache: Any, slots: Any) -> Any:
    """Return the KV that vLLM's attention reads in these slots, as [parts, tokens, width]."""
    if not getattr(cache, "is_floating_point", bool)() or cache.element_size() == 1:
        raise NotAudited(f"vLLM's KV is {_kind(cache)}")
    if cache.ndim == 3:  # MLA: [blocks, slots, width]
        return cache[slots // cache.shape[1], slots % cache.shape[1]][None]
    if cache.ndim == 4:  # [blocks, heads, slots, K followed by V]
        rows = cache[slots // cache.shape[2], :, slots % cache.shape[2]]
        return rows.unflatten(2, (2, -1)).permute(2, 0, 1, 3).flatten(2)
    if cache.ndim == 5 and 2 in cache.shape[:2]:  # [2 (K, V), blocks, slots, heads, width], or blocks first
        cache = cache if cache.shape[0] == 2 else cache.transpose(0, 1)
        return cache[:, slots // cache.shape[2], slots % cache.shape[2]].flatten(2)
    raise NotAudited(f"vLLM's KV is {_kind(cache)}")


def _kind(tensor: Any) -> str:
    shape = getattr(tensor, "shape", None)
    return f"{tensor.dtype} {tuple(shape)}" if shape is not None else f"a {type(tensor).__name__}"


def begin(connector: Any, fraction: float, key: str) -> Audit | None:
    """Audit this connector. Return None if the audit does not support the connector. key: for `applying.attach`."""
    reason = _reason(connector)
    if reason:
        engine_log.warning(f"audit: hits of {type(connector).__name__} are not audited: {reason}")
        return None
    found = Audit(connector, fraction)
    vars(connector)[_HELD] = found
    applying.attach(type(connector), "get_num_new_matched_tokens", key, after(_promise_nothing, _is_hit))
    return found


def _reason(connector: Any) -> str:
    """Return the reason why the audit does not support this connector, or ""."""
    impl = getattr(connector, "_lmcache_engine", None)
    if impl is None:
        return "the audit supports only LMCache in process (LMCacheConnectorV1)"
    config, cache = impl.config, getattr(getattr(connector, "_vllm_config", None), "cache_config", None)
    kv_type = str(getattr(cache, "cache_dtype", "auto"))
    if impl.kv_role == "kv_consumer":
        return "kv_role is kv_consumer, which stores nothing"
    if kv_type not in _EXACT:
        return f"the KV cache is quantized ({kv_type})"
    serde = getattr(config, "remote_serde", None) if getattr(config, "remote_url", None) else None
    if serde not in (None, "naive"):
        return f"remote_serde={serde} changes the stored KV"
    return next((f"{name} is set" for name in _OTHER_WAYS if getattr(config, name, False)), "")


def _is_hit(connector: Any, answer: Any, request: Any, *_: Any, **__: Any) -> bool:
    audit = vars(connector).get(_HELD)
    return bool(audit is not None and answer[0] and not answer[1] and audit.takes(request.request_id))


def _promise_nothing(connector: Any, answer: Any, request: Any, num_computed_tokens: int, *_: Any, **__: Any) -> Any:
    vars(connector)[_HELD].miss(request.request_id, num_computed_tokens)
    return 0, False
