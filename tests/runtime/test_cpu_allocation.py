"""KVF016 on LMCache's own `allocate`, with an allocator without memory and a simulated clock."""

import pytest

from tests.conftest import ForkServer

CASE = """
import time
from types import SimpleNamespace
import kvfix
from kvfix import clock
kvfix.apply({only})
import lmcache.v1.storage_backend.local_cpu_backend as module
module.logger.disabled = True
class Never(Exception): ...
slept = []
def sleep(seconds):
    slept.append(seconds)
    if len(slept) > 300:
        raise Never
time.sleep, clock.now = sleep, lambda: sum(slept)
backend = SimpleNamespace(
    layerwise=False, enable_blending=False, use_hot=False,
    memory_allocator=SimpleNamespace(allocate=lambda *_: {memory}),
    stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda keys: None),
)
try:
    result = [module.LocalCPUBackend.allocate(backend, None, None{more}), round(sum(slept))]
except Never:
    result = ["never", round(sum(slept))]
"""


@pytest.mark.parametrize("name", ["0.3.9", "0.4.2", "0.5.6"])
@pytest.mark.parametrize(
    ("only", "memory", "more", "answer"),
    [
        ("only=[]", "None", "", ["never", 30]),  # as released
        ("", "None", "", [None, 10]),
        ("", "7", "", [7, 0]),
        ("", "None", ", busy_loop=False", [None, 0]),
        ("", "None", ", eviction=False", [None, 0]),
    ],
)
def test_allocate(name, only, memory, more, answer, fork_server: ForkServer, release) -> None:  # type: ignore[no-untyped-def]
    assert fork_server(CASE.format(only=only, memory=memory, more=more), release(name)) == answer
