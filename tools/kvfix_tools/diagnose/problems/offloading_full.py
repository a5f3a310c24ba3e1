"""OffloadingConnector of vLLM: a tier that is full, or that cannot be asked."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
_TIERING = "vllm/v1/kv_offload/tiering"
_PULLS = "https://github.com/vllm-project/vllm/pull"

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
)
