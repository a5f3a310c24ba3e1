"""Every kind of wrong KV in the tensors is found, and moved KV is right."""

from typing import Any

import pytest

from kvfix_tools.lab.options import Options
from tests.conform.test_conform import LMCACHE
from tests.conftest import Once

CONTENTS = [-7_205_759_403_792_794, 1, 2**62 + 9, 77]


def another_layer(first: Any, second: Any) -> None:
    first[1] = second[1]


def v_in_place_of_k(first: Any, second: Any) -> None:
    first[1] = first[1].roll(32, dims=-1)


def one_slot_further(first: Any, second: Any) -> None:
    first[1] = first[1].roll(1, dims=1)


def in_part(first: Any, second: Any) -> None:
    first[1, :, :, 40:] = 0


def one_element(first: Any, second: Any) -> None:
    first[1, 0, 2, 50] += 1


def not_a_number(first: Any, second: Any) -> None:
    first[1] = float("nan")


def in_half_precision(first: Any, second: Any) -> None:
    first[1] = first[1].bfloat16().float()


#: What is done to block 1 of a layer.
WRONG = (another_layer, v_in_place_of_k, one_slot_further, in_part, one_element, not_a_number)


def seen() -> Any:
    """Contents of block 1 as the lab reads them, after each of these."""
    from kvfix_tools.lab.engine import kv_layout, vllm_objects
    from kvfix_tools.lab.engine.tensor_memory import TensorMemory

    options = Options(connector="a:B", layers=2, block_size=4, num_blocks=3, max_model_len=64)
    config = kv_layout.kv_cache(options, vllm_objects.vllm_config(Options(num_blocks=3)))
    found = {}
    for done in (*WRONG, in_half_precision):
        memory = TensorMemory(config)
        block = memory.blocks[1]
        block[:] = CONTENTS
        others = [memory.go_on(layer) for layer in memory.layers()[1:]]
        first, second = memory.kv_caches.values()
        done(first, second)
        memory.begin()
        found[done.__name__] = {"contents": block[:], "others": [sorted(each) for each in others]}
    return found


def test_what_was_only_moved_is_right(once: Once) -> None:
    assert once(seen, LMCACHE)["in_half_precision"] == {"contents": CONTENTS, "others": [[]]}


@pytest.mark.parametrize("fault", [each.__name__ for each in WRONG])
def test_wrong_kv_is_seen(once: Once, fault: str) -> None:
    contents = once(seen, LMCACHE)[fault]["contents"]
    assert contents != CONTENTS
    assert set(contents) <= {-1, *CONTENTS}
