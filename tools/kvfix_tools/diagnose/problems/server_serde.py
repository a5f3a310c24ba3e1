"""What the LMCache server's L2 adapters do to a chunk before they store it (`serde`)."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD736",
        name="turboquant-kernel-not-for-this-dtype",
        severity=Severity.SLOW,
        title="The turboquant serde cannot be compiled for this KV dtype on this GPU: nothing is stored in L2.",
        shows=(Failed(kind="CompilationError", through="serde/turboquant/"),),
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
)
