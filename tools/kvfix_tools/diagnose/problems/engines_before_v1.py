"""Images and builds of early 2025: LMCache in vLLM's old engine."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

PROBLEMS = (
    Problem(
        code="KVD829",
        name="lmcache-in-the-old-engine",
        severity=Severity.CRASH,
        title="An image of early 2025 with LMCache in vLLM's old engine does not work with itself.",
        shows=(
            Failed(kind="AttributeError", text="' object has no attribute 'store_cache'"),
            Failed(kind="NameError", text="name 'LMCacheModelRequest' is not defined"),
        ),
        sentence="a part of LMCache's changes to vLLM's V0 engine is missing",
        cause="LMCache's images up to 2025-04 (lmcache/vllm-openai:2025-03-28) carry a changed vLLM: requests have "
        "`store_cache` there, and no request of the API does; pipeline parallelism was never finished in it "
        "(LMCacheModelRequest). The connector is LMCacheConnector, of the V0 engine.",
        now='the image lmcache/vllm-openai:v0.3.9 or newer with --kv-transfer-config \'{"kv_connector":'
        '"LMCacheConnectorV1","kv_role":"kv_both"}\'',
        good="vLLM 0.11.2 or newer with LMCacheConnectorV1",
        threads=(
            "https://github.com/vllm-project/production-stack/issues/378",
            "https://github.com/vllm-project/production-stack/issues/433",
            "https://github.com/LMCache/LMCache/issues/538",
        ),
    ),
)
