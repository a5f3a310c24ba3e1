"""Every kind of wrong KV in the tensors is found, and moved KV is right."""

from collections.abc import Callable
from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from tests.conform.test_conform import LMCACHE
from tests.conftest import Once

CONTENTS = [-7_205_759_403_792_794, 1, 2**62 + 9, 77]


#: {fault: what is done to block 1 of the first layer}
WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "another layer": lambda first, second: first[1].copy_(second[1]),
    "V in place of K": lambda first, _: first[1].copy_(first[1].roll(32, dims=-1)),
    "one slot further": lambda first, _: first[1].copy_(first[1].roll(1, dims=1)),
    "in part": lambda first, _: first[1, :, :, 40:].zero_(),
    "one element": lambda first, _: first[1, 0, 2, 50].add_(1),
    "not a number": lambda first, _: first[1].fill_(float("nan")),
}
MOVED = {"in half precision": lambda first, _: first[1].copy_(first[1].bfloat16().float())}


def seen() -> Any:
    """Contents of block 1 as the lab reads them, after each of these."""
    from kvfix_tools.lab.engine import kv_layout, vllm_objects
    from kvfix_tools.lab.engine.tensor_memory import TensorMemory

    options = Options(connector="a:B", layers=2, block_size=4, num_blocks=3, max_model_len=64)
    config = kv_layout.kv_cache(options, vllm_objects.vllm_config(Options(num_blocks=3)))
    found = {}
    for name, do in {**WRONG, **MOVED}.items():
        memory = TensorMemory(config)
        block = memory.blocks[1]
        block[:] = CONTENTS
        others = [memory.go_on(layer) for layer in memory.layers()[1:]]
        first, second = memory.kv_caches.values()
        do(first, second)
        memory.begin()
        found[name] = {"contents": block[:], "others": [sorted(each) for each in others]}
    return found


def test_what_was_only_moved_is_right(once: Once) -> None:
    assert once(seen, LMCACHE)["in half precision"] == {"contents": CONTENTS, "others": [[]]}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kv_is_seen(once: Once, fault: str) -> None:
    contents = once(seen, LMCACHE)[fault]["contents"]
    assert contents != CONTENTS
    assert set(contents) <= {-1, *CONTENTS}
