"""The installed LMCache's and vLLM's own code moves KV on CPU tensors: what comes back, and what each says of itself.

Everything is real but what the report names as stood in for: `torch.cuda`, and the driver's batched copy.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvfix_tools.roundtrip.backends.lmcache import LAYOUTS
from tests.conftest import Zygote

RUN = """
import contextlib, io, json
from kvfix_tools.roundtrip import command
said = io.StringIO()
with contextlib.redirect_stdout(said):
    code = command.main([*{arguments!r}, "--device", "cpu", "--gib", "0", "--json"])
result = {{**json.loads(said.getvalue()), "exit": code}}
"""


@pytest.fixture(scope="module")
def run(zygote: Zygote) -> Any:
    """`kvfix roundtrip` where vLLM has been imported already."""
    return lambda *arguments, lmcache=None: zygote(RUN.format(arguments=arguments), lmcache)


def verdicts(answer: dict[str, Any], backend: str) -> dict[str, set[str]]:
    """{layout: verdicts of its cells}"""
    found: dict[str, set[str]] = {}
    for cell in answer["cells"]:
        if cell["cell"]["backend"] == backend:
            found.setdefault(cell["cell"]["layout"], set()).add(cell["verdict"])
    return found


def of(answer: dict[str, Any], layout: str, verdict: str = "failed") -> list[dict[str, Any]]:
    return [cell for cell in answer["cells"] if (cell["cell"]["layout"], cell["verdict"]) == (layout, verdict)]


@pytest.fixture(scope="module")
def lmcache(run: Any) -> dict[str, Any]:
    return run("--backend", "lmcache")


@pytest.fixture(scope="module")
def engine(run: Any) -> dict[str, Any]:
    return run("--backend", "lmcache-engine")


@pytest.mark.parametrize("backend", ["lmcache-v2", "lmcache-v3", "lmcache-layerwise", "lmcache-mp"])
def test_what_lmcache_says_that_it_can_it_can(lmcache: dict[str, Any], backend: str) -> None:
    """All layouts but the packed one, and those with heads outside, for which its torch operations have no code."""
    found = verdicts(lmcache, backend)
    for layout in ("nhd", "nhd-block-first", "mla"):
        assert found[layout] == {"passed"}, layout
    said = {cell["operations"] for cell in lmcache["cells"] if cell["verdict"] == "passed"}
    assert all("its torch fall-back" in one and "stood in for" in one for one in said)


def test_what_is_refused_is_refused_for_a_reason(lmcache: dict[str, Any], engine: dict[str, Any]) -> None:
    """Nothing of the plain layouts is left out."""
    for cell in [*lmcache["cells"], *engine["cells"]]:
        if cell["verdict"] == "refused":
            assert cell["cell"]["layout"] not in ("nhd", "nhd-block-first", "mla")
        if cell["verdict"] == "refused" and cell["cell"]["layout"].startswith("hnd"):
            assert "HND layouts are not supported in the non-CUDA fallback" in cell["reason"]


def test_the_packed_layout_comes_back_wrong_in_silence(lmcache: dict[str, Any], engine: dict[str, Any]) -> None:
    """LMCache issue 4463, on CPU tensors: the default connector, alone and under the cache engine."""
    assert lmcache["exit"] == engine["exit"] == 1
    for answer, backend in ((lmcache, "lmcache-v2"), (engine, "lmcache-engine")):
        found = verdicts(answer, backend)
        assert found["packed"] == {"failed"}  # never right, and never an error
        assert {layout for layout, seen in found.items() if seen & {"failed", "crashed"}} == {"packed"}
    for cell in of(engine, "packed"):
        [finding] = cell["findings"]
        assert finding["check"] == "round trip, KV cache"
        assert {"bystander written", "not written"} <= finding["classes"].keys()


def test_the_multi_process_mode_takes_every_layout(lmcache: dict[str, Any]) -> None:
    """The packed ones too, host memory included: the issue says that it is not affected."""
    assert verdicts(lmcache, "lmcache-mp") == {layout: {"passed"} for layout in LAYOUTS}


def test_the_layerwise_connector_takes_heads_for_tokens(lmcache: dict[str, Any]) -> None:
    """Its torch operation (0.5.6 torch_ops/mem_kernels.py:323) indexes HND as NHD, where the other one refuses."""
    found = verdicts(lmcache, "lmcache-layerwise")
    assert "passed" not in found["hnd"] | found["hnd-block-first"]
    assert any("IndexError" in cell["reason"] for cell in of(lmcache, "hnd", "crashed"))


def test_through_the_cache_engine(engine: dict[str, Any]) -> None:
    passed = [cell for cell in engine["cells"] if cell["verdict"] == "passed"]
    assert {cell["cell"]["layout"] for cell in passed} == {"nhd", "nhd-block-first", "mla"}
    assert any(int(cell["cell"]["chunk"]) % 2 == 0 and cell["cell"]["skip"] != "none" for cell in passed)


@pytest.mark.parametrize("fault", ["swap-kv", "stale", "drop-tail", "neighbour-write"])
def test_a_fault_is_named_where_the_host_memory_is_lmcaches_own(run: Any, fault: str) -> None:
    one = ["--layout", "nhd", "--dtype", "bfloat16", "--tokens", "prime", "--slots", "random", "--block", "16"]
    one += ["--chunk", "64", "--heads", "2", "--skip", "none"]
    answer = run("--backend", "lmcache-engine", *one, "--inject", fault)
    [cell] = answer["cells"]
    from kvfix_tools.roundtrip.inject import FAULTS

    assert cell["verdict"] == "failed"
    assert set(cell["findings"][0]["classes"]) == {FAULTS[fault]}


def test_vllms_own_offload(run: Any) -> None:
    answer = run("--backend", "vllm")
    assert answer["exit"] == 0
    for backend in ("vllm-simple", "vllm-offload"):
        found = verdicts(answer, backend)
        assert len(found) == 11
        assert all(seen == {"passed"} for seen in found.values())


def test_whole_blocks_only(run: Any) -> None:
    one = ["--layout", "nhd", "--dtype", "uint8", "--block", "16", "--chunk", "32", "--heads", "1", "--skip", "none"]
    answer = run("--backend", "vllm", *one, "--tokens", "33", "32", "--slots", "blocks", "random")
    verdict = {(cell["cell"]["tokens"], cell["cell"]["slots"]): cell["verdict"] for cell in answer["cells"]}
    assert verdict.pop(("32", "blocks")) == "passed"
    assert set(verdict.values()) == {"refused"}


def test_an_older_lmcache(run: Any, release: Any) -> None:
    """0.5.3, the newest whose compiled operations load on torch 2.11 with CUDA 13."""
    answer = run("--backend", "lmcache-v2", lmcache=release("0.5.3"))
    found = verdicts(answer, "lmcache-v2")
    assert {layout for layout, seen in found.items() if "passed" in seen} == {"nhd", "nhd-block-first", "mla"}
    assert "failed" in found["packed"]
    assert "lmcache 0.5.3" in of(answer, "nhd", "passed")[0]["operations"]
