"""A corrected hook beside the original of LMCache 0.3.10: the lookup cache answers, the cheapest way through it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.row import Row
from tests.conftest import ADAPTER, RELEASES, Zygote

CASE = f"""
import timeit, kvfix
from types import SimpleNamespace
import {ADAPTER} as adapter
adapter.logger.disabled = True
cls = adapter.LMCacheConnectorV1Impl
impl = cls.__new__(cls)
impl.kv_role, impl.load_specs, impl._requests_priority = "kv_both", {{}}, {{}}
impl.lookup_client = SimpleNamespace(lookup_cache=lambda lookup_id: 256, supports_producer_reuse=True)
request = SimpleNamespace(request_id="r", num_tokens=1000)
def once():
    runs = timeit.repeat(lambda: impl.get_num_new_matched_tokens(request, 16), number=20000, repeat=3)
    return min(runs) / 20000 * 1e6
without, with_kvfix = [], []
for _ in range(7):
    kvfix.revert()
    without.append(once())
    kvfix.apply()
    with_kvfix.append(once())
result = [sorted(without)[3], sorted(with_kvfix)[3]]
"""


def measure() -> Iterator[Row]:
    zygote = Zygote()
    try:
        without, with_kvfix = zygote(CASE, RELEASES / "0.3.10")
    finally:
        zygote.close()
    yield Row(
        "get_num_new_matched_tokens with KVF001", with_kvfix - without, "us", f"as released {without:.2f} us", at_most=1
    )
