"""What the LMCache server's L2 adapters do to a chunk before they store it (`serde`)."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_WRAPPER = "lmcache/v1/distributed/l2_adapters/serde_wrapper.py"
_PROCESSOR = "lmcache/v1/distributed/serde/async_processor.py"

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
    Problem(
        code="KVD1780",
        name="l2-serde-fails",
        severity=Severity.SLOW,
        title="The serde of an L2 adapter fails at chunks: they are not stored in L2, or count as missing there.",
        shows=(
            Logged("Serde wrapper: submit_serialize raised for store task <task>", _WRAPPER),
            Logged("Serde wrapper: submit_deserialize raised for task <task>", _WRAPPER),
            Logged("Serde wrapper: deserialize failed for task <task>; reporting all keys as failed", _WRAPPER),
            Logged("Serde: <kind> task <task> failed (<count> objects)", _PROCESSOR),
            Logged("Serde task <task> (<kind>) failed", _PROCESSOR),
        ),
        announces=True,
        releases={"lmcache": ">=0.4.5"},
        cause="The traceback below it decides: a KV dtype or layout that the serde does not take, several KV groups in "
        "one object, or, at loads, an object that was written with another serde, or with none.",
        now='another "serde" in --l2-adapter, or none, with an empty base_path or bucket; restart the server',
        good="a store for each serde, model and --kv-cache-dtype",
        sure=False,
    ),
    Problem(
        code="KVD1781",
        name="l2-serde-without-room",
        severity=Severity.SLOW,
        title="The serde of an L2 adapter has no memory for its copy: the chunk is not stored, or not loaded.",
        shows=(
            Logged("Serde wrapper: temp alloc failed for store task <task>", _WRAPPER),
            Logged("Serde wrapper: temp alloc failed for load task <task>", _WRAPPER),
        ),
        sentence="L1 has no room for the copy of task {task}",
        releases={"lmcache": ">=0.4.5"},
        cause="What is stored with a serde, or loaded, passes through a second piece of L1 memory, and L1 is full of "
        "chunks that are locked or wait for L2.",
        now="a larger --l1-size-gb, a lower --eviction-trigger-watermark (0.7); restart the server",
        good="an L1 that the chunks of all requests at once leave room in; no release changes that",
    ),
)
