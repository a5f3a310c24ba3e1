"""The installed LMCache and vLLM copy KV of CPU tensors, or refuse a layout. The report names CUDA's stand-ins."""

from typing import Any

import pytest

from kvfix_tools.roundtrip import races
from kvfix_tools.roundtrip.backends.lmcache import LAYOUTS
from kvfix_tools.roundtrip.layout import LAYOUTS as EVERY_LAYOUT
from kvfix_tools.roundtrip.planted_faults import FAULTS
from tests.conftest import ForkServer, release
from tests.roundtrip.test_command import SIZES, output_of
from tests.roundtrip.test_planted_faults import WITHOUT

PACKED = ("packed", "packed-hnd", "packed-pool")
PLAIN = ("nhd", "nhd-block-first", "mla")
#: {backend: layouts with which every cell passes if the fixes are applied}
RIGHT = {
    **dict.fromkeys(("lmcache-v2", "lmcache-v3", "lmcache-engine"), (*PLAIN, *PACKED)),
    "lmcache-layerwise": (*PLAIN, "hnd", "hnd-block-first"),
    "lmcache-mp": LAYOUTS,
}


@pytest.fixture(scope="module")
def run(fork_server: ForkServer) -> Any:
    return lambda *arguments, lmcache=None: fork_server(output_of, lmcache, *arguments, "--gib", "0")


def verdicts(answer: dict[str, Any], backend: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for cell in answer["cells"]:
        if cell["cell"]["backend"] == backend:
            found.setdefault(cell["cell"]["layout"], set()).add(cell["verdict"])
    return found


def of(answer: dict[str, Any], layout: str, verdict: str = "failed") -> list[dict[str, Any]]:
    return [cell for cell in answer["cells"] if (cell["cell"]["layout"], cell["verdict"]) == (layout, verdict)]


@pytest.fixture(scope="module")
def as_released(run: Any) -> dict[str, Any]:
    some = ["--layout", "packed", "packed-hnd", "hnd", "hnd-block-first", "--no-fixes"]
    return run("--backend", "lmcache-v2", "lmcache-v3", "lmcache-layerwise", "lmcache-engine", *some)


def test_the_default_matrix_passes(run: Any) -> None:
    """With the fixes, the packed layouts of vLLM 0.26 and later pass too. The report says why LMCache refuses HND."""
    lmcache = run("--backend", "lmcache", "lmcache-engine")
    assert lmcache["exit"] == 0
    assert {"KVF020", "KVF021"} <= set(lmcache["fixes"])
    cells = [cell["cell"] for cell in lmcache["cells"] if cell["verdict"] == "passed"]
    for backend, right in RIGHT.items():
        assert {layout for layout, verdict in verdicts(lmcache, backend).items() if verdict == {"passed"}} == set(right)
    assert any(cell["skip"] != "none" for cell in cells if cell["backend"] == "lmcache-engine")
    for cell in lmcache["cells"]:
        assert not cell["known"]
        if cell["verdict"] == "refused" and cell["cell"]["layout"].startswith("hnd"):
            assert "HND layouts are not supported in the non-CUDA fallback" in cell["reason"]
        elif cell["verdict"] == "passed" and not cell["race"]:
            assert "its torch fallback" in cell["operations"]
            assert "is a stand-in" in cell["operations"]


def test_the_packed_layout_comes_back_wrong_in_silence(as_released: dict[str, Any]) -> None:
    """The report shows LMCache issue 4463 on CPU tensors, for the default connector and for the cache engine."""
    assert (as_released["exit"], as_released["fixes"]) == (1, [])
    for backend in ("lmcache-v2", "lmcache-engine"):
        found = verdicts(as_released, backend)
        assert found["packed"] == {"failed"}  # always wrong, and never an error
        assert {layout for layout, verdict in found.items() if verdict & {"failed", "crashed"}} <= set(PACKED)
    for cell in of(as_released, "packed"):
        assert cell["known"].startswith("LMCache issue 4463: wrong KV from the packed layout")
        assert "Do: kvfix run -- vllm serve ... (KVF020)" in cell["known"]
        assert cell["command"].endswith("--no-fixes")
    [finding] = next(cell for cell in of(as_released, "packed") if "engine" in cell["cell"]["backend"])["findings"]
    assert finding["check"] == "round trip, KV cache"
    assert {"other slot written", "not written"} <= finding["classes"].keys()


def test_the_layerwise_connector_takes_heads_for_tokens(as_released: dict[str, Any]) -> None:
    """The layerwise operation (0.5.6 torch_ops/mem_kernels.py:323) reads HND as NHD. Other operations refuse HND."""
    for layout in ("hnd", "hnd-block-first"):
        assert "passed" not in verdicts(as_released, "lmcache-layerwise")[layout]
    crashed = of(as_released, "hnd", "crashed")
    assert any("IndexError" in cell["reason"] for cell in crashed)
    assert all(cell["known"].startswith("layerwise loads mix up heads and tokens: ") for cell in crashed)


@pytest.mark.parametrize("fault", ["swap-kv", "stale", "drop-tail", "neighbour-write"])
def test_a_fault_is_named_where_the_host_memory_is_lmcaches_own(run: Any, fault: str) -> None:
    one = ["--layout", "nhd", "--dtype", "bfloat16", "--tokens", "prime", "--slots", "random", "--block", "16"]
    one += ["--chunk", "64", "--heads", "2", "--skip", "none"]
    [cell] = run("--backend", "lmcache-engine", *one, "--inject", fault)["cells"]
    assert cell["verdict"] == "failed"
    assert set(cell["findings"][0]["classes"]) == {FAULTS[fault]}


def test_without_a_backend_it_tests_what_is_installed(run: Any) -> None:
    answer = run(*SIZES)
    tested = {cell["cell"]["backend"] for cell in answer["cells"]}
    assert {"torch", "lmcache-v2", "lmcache-mp", "lmcache-engine", "vllm-simple", "vllm-offload"} <= tested
    assert answer["exit"] == 0


def test_vllms_own_offload(run: Any) -> None:
    answer = run("--backend", "vllm")
    for backend in ("vllm-simple", "vllm-offload"):
        assert verdicts(answer, backend) == {layout: {"passed"} for layout in EVERY_LAYOUT}


def test_whole_blocks_only(run: Any) -> None:
    one = ["--layout", "nhd", "--dtype", "uint8", "--block", "16", "--chunk", "32", "--heads", "1", "--skip", "none"]
    answer = run("--backend", "vllm", *one, "--tokens", "33", "32", "--slots", "blocks", "random")
    verdict = {(cell["cell"]["tokens"], cell["cell"]["slots"]): cell["verdict"] for cell in answer["cells"]}
    assert verdict.pop(("32", "blocks")) == "passed"
    assert set(verdict.values()) == {"refused"}


def test_races_with_lmcaches_own_streams(run: Any) -> None:
    """With LMCache's stream waits, no race has a finding. Without the waits, each race has the expected finding."""
    some = ["--backend", "lmcache-v2", "lmcache-v3"]
    sound, without = run(*some, "--race"), run(*some, "--inject", "missing-event")
    assert (sound["exit"], without["exit"]) == (0, 1)
    assert set(races.RACES) == set(WITHOUT)
    each = {(backend, race) for backend in some[1:] for race in WITHOUT if race != "many-in-flight"}
    for answer in (sound, without):
        assert {(cell["cell"]["backend"], cell["race"]) for cell in answer["cells"]} == each
        assert all("queues in place of CUDA streams" in cell["operations"] for cell in answer["cells"])
    for cell in without["cells"]:
        [finding] = cell["findings"]
        assert set(finding["classes"]) == {WITHOUT[cell["race"]]}
        assert cell["command"].endswith(f"--race {cell['race']} --seed 0 --inject missing-event")


def test_an_older_lmcache(run: Any) -> None:
    """LMCache 0.5.3 is the newest release whose compiled operations load on torch 2.11 with CUDA 13."""
    answer = run("--backend", "lmcache", lmcache=release("0.5.3"))
    assert answer["exit"] == 0
    found = verdicts(answer, "lmcache-v2")
    assert {layout for layout, verdict in found.items() if "passed" in verdict} == {*PLAIN, *PACKED}
    assert "lmcache 0.5.3" in of(answer, "nhd", "passed")[0]["operations"]


@pytest.mark.parametrize("name", ["0.4.5", "0.5.0"])
def test_the_packed_layout_with_each_age_of_lmcache(run: Any, name: str) -> None:
    """LMCache 0.4.5 does not know the packed layout. LMCache 0.5.0 to 0.5.2 take it for another layout."""
    some = ["--backend", "lmcache-v2", "lmcache-engine", "--layout", "packed", "packed-hnd"]
    assert run(*some, lmcache=release(name))["exit"] == 0
    assert run(*some, "--no-fixes", lmcache=release(name))["exit"] != 0


def test_fp8_of_deepseek(run: Any) -> None:
    """fp8_ds_mla, DeepSeek's format, has 656 bytes for a token."""
    some = ["--layout", "mla", "--dtype", "uint8", "--head-size", "656", "--tokens", "1", "chunk+1", "prime"]
    answer = run("--backend", "torch", "lmcache-v2", "lmcache-v3", "lmcache-mp", "lmcache-engine", *some)
    assert answer["exit"] == 0
    assert {cell["cell"]["backend"] for cell in answer["cells"] if cell["verdict"] == "passed"} >= {
        "torch", "lmcache-v2", "lmcache-v3", "lmcache-engine",
    }  # fmt: skip
