"""Options of the LMCache server that do not fit its machine, or the vLLM that connects to it."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ADAPTER = "lmcache/integration/vllm/vllm_multi_process_adapter.py"
_BLEND = "lmcache/v1/multiprocess/modules/blend"
_GDS = "lmcache/v1/gpu_connector/gds_backends"
_MP = ("LMCacheMPConnector", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD465",
        name="gds-backend-of-another-device",
        severity=Severity.CRASH,
        title="The server's L1 on disk (GDS) is to use a library that is not for this GPU or this device.",
        shows=(
            Failed(kind="ValueError", text="cufile requires a CUDA PyTorch build", at=f"{_GDS}/cufile.py"),
            Failed(kind="ValueError", text="hipfile requires a ROCm PyTorch build", at=f"{_GDS}/hipfile.py"),
            Failed(kind="ValueError", text="mufile requires a MUSA PyTorch build", at=f"{_GDS}/mufile.py"),
            Failed(kind="ValueError", text="mufile requires --gds-l1-use-direct-io", at=f"{_GDS}/mufile.py"),
            Failed(kind="ValueError", text="phx requires a ROCm or CUDA PyTorch build", at=f"{_GDS}/phx.py"),
            Failed(kind="ValueError", text="ugds requires a ROCm or CUDA PyTorch build", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="uGDS path must be a character device: <path>", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="uGDS path is not managed by ugds_drv: <path>", at=f"{_GDS}/ugds.py"),
            Failed(kind="ValueError", text="no default GDS backend for this environment"),
            Failed(kind="ValueError", text="unsupported GDS L1 backend: <name>"),
        ),
        releases={"lmcache": ">=0.5.6"},
        cause="--gds-l1-backend chooses the library: cufile for NVIDIA, hipfile for AMD, mufile for Moore Threads; "
        "ugds wants a character device of ugds_drv as --gds-l1-path, not a folder. torch in the server's environment "
        "has to be built for the same GPU.",
        now="lmcache server --gds-l1-backend auto, with the torch of this GPU (python -c 'import torch; "
        "print(torch.version.cuda, torch.version.hip)'); or --l1-size-gb without --gds-l1-path",
        good="the backend that `auto` takes, or an L1 in host memory",
    ),
    Problem(
        code="KVD466",
        name="server-without-experimental",
        severity=Severity.SLOW,
        title="The LMCache server does not answer what this client asks first: it is older, or busy.",
        shows=(Logged("LMCache server did not answer GET_EXPERIMENTAL within", _ADAPTER),),
        sentence="the server did not say which experimental features it has",
        connectors=_MP,
        releases={"lmcache": ">=0.5.3"},
        cause="Servers before 0.5.3 do not know this request and drop it. The client goes on without those features "
        "(transfer_query); what else differs between the two releases fails later.",
        now="the same LMCache for server and vLLM: `lmcache --version` (or pip show lmcache) in both containers; with "
        "equal releases look whether the server is overloaded",
        good="image tags of one release: lmcache/standalone:vX with lmcache/vllm-openai:vX",
        sure=False,
    ),
    Problem(
        code="KVD467",
        name="blend-server-without-blend-client",
        severity=Severity.CRASH,
        title="The LMCache server runs CacheBlend, and no vLLM tells it the rotary positions of its model.",
        shows=(
            Failed(
                kind="ValueError",
                text="Instance <instance> has no CB rope state; send CB_REGISTER_ROPE before",
                at=f"{_BLEND}/retrieve.py",
            ),
            Logged("No CB GPU context for model <model> ws <size> during", f"{_BLEND}/lookup.py"),
        ),
        releases={"lmcache": ">=0.5.5"},
        cause="--engine-type blend needs a client that sends CB_REGISTER_ROPE after its KV caches. LMCacheMPConnector "
        "of the releases up to 0.5.6 sends none, so nothing is blended.",
        now="lmcache server without --engine-type blend (prefix hits only); CacheBlend in vLLM's own process: "
        "LMCacheConnectorV1 with enable_blending: true",
        good="a connector that has CacheBlend for the server: none is in LMCache 0.5.6",
        threads=("https://github.com/LMCache/LMCache/issues/5101",),
    ),
)
