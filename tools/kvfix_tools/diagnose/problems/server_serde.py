"""What the LMCache server's L2 adapters do to a chunk before they store it (`serde`)."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD736",
        name="turboquant-kernel-not-for-this-dtype",
        severity=Severity.SLOW,
        title="The turboquant serde cannot be compiled for this KV dtype on this GPU: nothing is stored in L2.",
        shows=(
            Failed(kind="CompilationError", through="serde/turboquant/"),
            Failed(kind="CompilationError", source="k_fp8 = k_vals.to("),
            Failed(kind="CompilationError", text="cannot cast uint8 to fp8e4nv"),
            Logged("k_fp8 = k_vals.to("),
        ),
        sentence="each task of the serde fails while its kernel is compiled",
        releases={"lmcache": ">=0.5.1"},
        cause="Its kernels that make FP8 keys (preset turboquant_k8v4) take 16-bit keys on GPUs with FP8 (8.9 and "
        "newer). With --kv-cache-dtype fp8 the keys are FP8 already, in bytes (`cannot cast uint8`); on A100 and A10 "
        "they cannot be made from bfloat16. The server goes on with L1 alone, and the stores count as completed.",
        now='another preset in --l2-adapter, "serde": {"type": "turboquant", "preset": "turboquant_4bit_nc"} (not with '
        "--kv-cache-dtype fp8), or no serde; restart the server",
        good="no release is right yet (0.5.6; LMCache pull request 4118 is open)",
        threads=(_LMCACHE + "issues/4064", _LMCACHE + "issues/5022"),
    ),
    Problem(
        code="KVD1088",
        name="turboquant-wants-split-layout",
        severity=Severity.SLOW,
        title="The turboquant serde takes no KV in which keys and values are packed: nothing is stored in L2.",
        shows=(
            Failed(
                kind="ValueError",
                text="TurboQuant serde expects first dim kv_size=2, got <size>",
                at="lmcache/v1/distributed/serde/turboquant/turboquant.py",
            ),
        ),
        sentence="the KV has {size} where turboquant wants 2, one for keys and one for values",
        releases={"lmcache": ">=0.5.1"},
        cause="vLLM 0.26 and newer keeps keys and values of a head next to each other, and so does a model with MLA; "
        "the serde was written for KV in which they are apart. L1 goes on, each store to L2 fails.",
        now='"serde": {"type": "fp8"} in --l2-adapter, which takes any layout, or no serde; restart the server',
        good="no release is right yet (0.5.6; LMCache pull request 4749 was closed)",
        threads=(_LMCACHE + "issues/4744",),
    ),
)
