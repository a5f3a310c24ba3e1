"""Images and charts with which a container of vLLM does not even start."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

PROBLEMS = (
    Problem(
        code="KVD134",
        name="image-for-another-processor",
        severity=Severity.CRASH,
        title="The image is made for another kind of processor than this machine's.",
        shows=(Logged("exec format error"), Logged("no matching manifest for <platform>")),
        cause="Images are for amd64 (Intel, AMD) or arm64 (Grace, GB10, Graviton). Those of LMCache are not always "
        "built for both; a tag that was built on one machine and pushed has one only.",
        now="docker manifest inspect IMAGE:TAG names its platforms; on arm64 vllm/vllm-openai of the release with "
        "LMCache built inside (pip install --no-deps --no-build-isolation --no-binary lmcache lmcache)",
        good="docker buildx build --platform linux/amd64,linux/arm64",
    ),
    Problem(
        code="KVD441",
        name="image-or-chart-refused",
        severity=Severity.CRASH,
        title="The image or the chart that was asked for does not exist so.",
        shows=(
            Logged("manifest unknown"),
            Logged("values don't meet the specifications of the schema(s)"),
        ),
        cause="A tag that was never pushed: LMCache's images carry LMCache's release (lmcache/vllm-openai:v0.4.2), "
        "vLLM's its own. Of a chart (production-stack) the lines below name the value and its type: sizes of "
        "lmcacheConfig are text.",
        now="a tag from the registry's page; in values.yaml the value in the type that is asked for "
        '(cpuOffloadingBufferSize: "20", in quotes)',
        good="the tag or the values",
    ),
)
