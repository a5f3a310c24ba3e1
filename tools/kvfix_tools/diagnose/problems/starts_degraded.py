"""LMCache goes on without what failed at its start, and says little of it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD833",
        name="failed-without-a-reason",
        severity=Severity.HANG,
        title="LMCache failed to start and names no reason: a setting that it asserts is missing.",
        shows=(Logged("Failed to initialize LMCacheManager components: . System"),),
        sentence="an assertion without a text failed while LMCache started",
        sure=False,
        releases={"lmcache": ">=0.3.14,<0.4.3"},
        cause="An assertion without a text, of which the line prints nothing. With enable_controller: "
        "lmcache_instance_id, controller_pull_url or lmcache_worker_ports (one for each rank) is missing "
        "(cache_controller/worker.py). Without a controller: what `LMCache Configuration:` lists as None beside the "
        "mode that is on (enable_p2p, enable_pd).",
        now="LMCACHE_ENABLE_CONTROLLER=false; or all of lmcache_instance_id: NAME, controller_pull_url: HOST:8300, "
        "controller_reply_url: HOST:8400, lmcache_worker_ports: [8500, 8501] (as many as ranks); restart",
        good="LMCache 0.4.3 or newer prints the whole traceback; with all settings of the mode it starts",
        threads=(_LMCACHE + "issues/2907",),
    ),
    Problem(
        code="KVD831",
        name="compiled-operations-not-loaded",
        severity=Severity.SLOW,
        title="LMCache's compiled operations do not load: it copies with slow Python code, or not at all.",
        shows=(
            Logged("Failed to import backend lmcache.<module>:"),
            Logged("Failed to import backend lmcache.<module>: lib<library>: cannot open shared object file"),
            Logged("Failed to import backend lmcache.<module>: <file>: undefined symbol: <symbol>"),
        ),
        sentence="lmcache.{module} did not load",
        sure=False,
        replaces=("KVD704",),
        releases={"lmcache": ">=0.5.0"},
        cause="The reason behind the colon decides. libcudart.so.13 on an AMD machine (`rocm` in vLLM's release): the "
        "wheel of PyPI is for CUDA, whatever the GPU. The same on NVIDIA: vLLM's torch is of CUDA 12, and this wheel "
        "of CUDA 13. An undefined symbol: it was built for another torch.",
        now="AMD: CXX=hipcc BUILD_WITH_HIP=1 pip install --no-build-isolation --no-deps --no-binary lmcache "
        "--force-reinstall lmcache; NVIDIA: the same without CXX and BUILD_WITH_HIP; then python -c 'import "
        "lmcache.c_ops' must be silent",
        good="a build for this torch: LMCache's own images, or for AMD the wheels beside its releases (v0.5.3-rocm and "
        "newer)",
        threads=("https://github.com/vllm-project/vllm/issues/50953",),
    ),
)
