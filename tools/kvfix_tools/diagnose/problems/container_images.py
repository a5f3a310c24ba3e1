"""Images and charts with which a container of vLLM does not even start."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

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
        said=(
            r"(?:vllm-openai|lmcache/standalone)",
            r"(?i)\bno\b[^.\n]{0,40}\b(?:images?|tags?)\b",
            r"(?i)hub|docker|\btags?\b",
        ),
        cause="A tag that was never pushed: LMCache's images carry LMCache's release (lmcache/vllm-openai:v0.4.2), "
        "vLLM's its own. Of a chart (production-stack) the lines below name the value and its type: sizes of "
        "lmcacheConfig are text.",
        now="a tag from the registry's page; in values.yaml the value in the type that is asked for "
        '(cpuOffloadingBufferSize: "20", in quotes)',
        good="the tag or the values",
        threads=("https://github.com/LMCache/LMCache/issues/3251",),
    ),
    Problem(
        code="KVD1350",
        name="openai-not-in-the-image",
        severity=Severity.CRASH,
        title="LMCache's command does not start: it imports its benchmark, and that the package openai.",
        shows=(Failed(kind="ModuleNotFoundError", text="No module named 'openai'", through="/lmcache/cli/"),),
        said=(
            r"(?i)lmcache",
            r"(?i)module ?not ?found|no module named",
            r"\bopenai`? (?:package|python)|[`']openai[`']",
        ),
        releases={"lmcache": ">=0.4.5,<0.5"},
        cause="`lmcache server` imports all commands, `lmcache bench` (cli/commands/bench/engine_bench) among them. "
        "The image lmcache/standalone:v0.4.5 has no openai.",
        now="an image of one's own: FROM lmcache/standalone:v0.4.5, RUN uv pip install --python /opt/venv/bin/python "
        "openai; or lmcache/vllm-openai of the same release, which has it",
        good="an image in which `/opt/venv/bin/lmcache --help` works",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/3353",),
    ),
)
