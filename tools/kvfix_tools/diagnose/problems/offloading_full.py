"""OffloadingConnector of vLLM: a tier that is full or cannot be asked, a copy that fails."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_TIERING = "vllm/v1/kv_offload/tiering"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_ILLEGAL = "an illegal memory access was encountered"

PROBLEMS = (
    Problem(
        code="KVD595",
        name="offload-tier-has-no-room",
        severity=Severity.RISK,
        title="The CPU tier has no room for new KV, and what is computed now is not kept.",
        shows=(Logged("Request <request>: cannot store chunks", at=f"{_V1}/offloading/scheduler.py"),),
        sentence="request {request}",
        releases={"vllm": ">=0.26"},
        sure=False,
        cause="All of the tier is being copied, loaded or written to a tier below, so that nothing can be evicted; or "
        "it is smaller than what one step stores. A few lines under load are normal. If they do not end, the tier is "
        "too small or the one below too slow, and each step tries again for nothing.",
        now="a larger --kv-offloading-size (`cpu_bytes_to_use`), fewer requests at once (--max-num-seqs); a faster "
        "disk where `secondary_tiers` are set",
        good="a tier that holds the KV of several steps of all requests",
        threads=(f"{_PULLS}/50069",),
    ),
    Problem(
        code="KVD597",
        name="offload-tier-cannot-be-asked",
        severity=Severity.SLOW,
        title="A tier below the CPU cannot be asked what it has, and every lookup in it is a miss.",
        shows=(Logged("batch_lookup failed on tier <tier> for <number> keys: <error>", f"{_TIERING}/async_lookup.py"),),
        sentence="tier {tier}: {error}",
        releases={"vllm": ">=0.26"},
        cause="The end of the line is the error: a folder that is gone or not readable, an object store that does not "
        "answer or refuses the key. The engine goes on and computes.",
        now="put right what the error names: `ls` of `root_dir` as the user of the engine; the endpoint and the keys "
        "of the object store",
        good="the same; nothing has to be restarted",
    ),
    Problem(
        code="KVD598",
        name="offload-copy-sees-illegal-access",
        severity=Severity.CRASH,
        title="An illegal memory access on the GPU was noticed in a copy of the OffloadingConnector.",
        shows=(
            Failed(text=_ILLEGAL, within="gpu_worker.py:transfer_async"),
            Failed(text=_ILLEGAL, within="gpu_worker.py:get_finished"),
            Failed(text=_ILLEGAL, within="cpu_gpu.py:transfer_async"),
            Failed(text=_ILLEGAL, within="cpu_gpu.py:get_finished"),
        ),
        sure=False,
        cause="The GPU tells of it at some later call, so it may be the copy's or the model's own. One start without "
        "OffloadingConnector decides. Reported for DeepSeek V4 with vLLM 0.27.1, whose KV groups have blocks of other "
        "sizes.",
        now="without OffloadingConnector (--kv-offloading-size, --kv-transfer-config), restart; if it stays, it is not "
        "the copy: `CUDA_LAUNCH_BLOCKING=1` shows the kernel",
        good="no release is known to be right for that model",
        threads=("https://github.com/vllm-project/vllm/issues/53607",),
    ),
)
