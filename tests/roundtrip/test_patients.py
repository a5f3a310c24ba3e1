"""The installed LMCache's and vLLM's own code moves KV on CPU tensors: what comes back, and what each says of itself.

Everything is real but what the report names as stood in for: `torch.cuda`, and the driver's batched copy.
"""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize("backend", ["lmcache-v2", "lmcache-v3", "lmcache-layerwise"])
def test_what_lmcache_says_that_it_can_it_can(lmcache: dict[str, Any], backend: str) -> None:
    """All layouts but the packed one, and those with heads outside, for which its torch operations have no code."""
    found = verdicts(lmcache, backend)
    for layout in ("nhd", "nhd-block-first", "mla"):
        assert "passed" in found[layout], layout
        assert found[layout] <= {"passed", "refused"}, layout
    said = {cell["operations"] for cell in lmcache["cells"] if cell["verdict"] == "passed"}
    assert all("its torch fall-back" in one and "stood in for" in one for one in said)


def test_what_is_refused_is_refused_for_a_reason(lmcache: dict[str, Any], engine: dict[str, Any]) -> None:
    """Nothing of the plain layouts is left out but fp8, for which torch has no index_copy on the CPU."""
    for cell in [*lmcache["cells"], *engine["cells"]]:
        if cell["verdict"] == "refused" and cell["cell"]["layout"] in ("nhd", "nhd-block-first", "mla"):
            assert "index_copy_cpu" in cell["reason"]
            assert cell["cell"]["dtype"].startswith("fp8")
        if cell["verdict"] == "refused" and cell["cell"]["layout"].startswith("hnd"):
            assert "HND layouts are not supported in the non-CUDA fallback" in cell["reason"]


def test_the_packed_layout_comes_back_wrong_in_silence(lmcache: dict[str, Any], engine: dict[str, Any]) -> None:
    """LMCache issue 4463, on CPU tensors: the default connector, alone and under the cache engine."""
    assert lmcache["exit"] == engine["exit"] == 1
    for answer, backend in ((lmcache, "lmcache-v2"), (engine, "lmcache-engine")):
        found = verdicts(answer, backend)
        assert found["packed"] <= {"failed", "refused"}  # never passed, and never an error
        assert "failed" in found["packed"]
        assert {layout for layout, seen in found.items() if seen & {"failed", "crashed"}} == {"packed"}
    for cell in of(engine, "packed"):
        [finding] = cell["findings"]
        assert finding["check"] == "round trip, KV cache"
        assert {"bystander written", "not written"} <= finding["classes"].keys()


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
        assert all("passed" in seen and seen <= {"passed", "refused"} for seen in found.values())
    reasons = {cell["reason"] for cell in answer["cells"] if cell["verdict"] == "refused"}
    assert reasons == {"whole blocks only"}


def test_an_older_lmcache(run: Any, release: Any) -> None:
    """0.5.3, the newest whose compiled operations load on torch 2.11 with CUDA 13."""
    answer = run("--backend", "lmcache-v2", lmcache=release("0.5.3"))
    found = verdicts(answer, "lmcache-v2")
    assert {layout for layout, seen in found.items() if "passed" in seen} == {"nhd", "nhd-block-first", "mla"}
    assert "failed" in found["packed"]
    assert "lmcache 0.5.3" in of(answer, "nhd", "passed")[0]["operations"]
