"""LMCache's parts and vLLM of different times: what one lacks that the other asks for."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD417",
        name="vllm-before-cached-request-data",
        severity=Severity.CRASH,
        title="This vLLM hands cached requests over as a list, which this LMCache does not take.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'list' object has no attribute 'req_ids'",
                within="vllm_v1_adapter.py:build_connector_meta",
            ),
            Failed(kind="AttributeError", text="'list' object has no attribute 'req_ids'", within="lmcache/"),
        ),
        sentence="vLLM is older than 0.9.2",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        cause="vLLM has one CachedRequestData for all requests from 0.9.2 on; before it was a list of them. LMCache's "
        "builds of July 2025 read only the new form.",
        now="pip install lmcache==0.3.1.post1 with vLLM 0.9.1 and older, or upgrade vLLM to 0.9.2",
        good="LMCache 0.3.9 or newer, which reads both forms",
        threads=(_LMCACHE + "issues/989",),
    ),
    Problem(
        code="KVD429",
        name="torch-utils-not-in-vllm",
        severity=Severity.CRASH,
        title="LMCache 0.3.8 asks for a module that vLLM has only from 0.11.1 on.",
        shows=(Failed(kind="ModuleNotFoundError", text="No module named 'vllm.utils.torch_utils'"),),
        sentence="this vLLM has no vllm.utils.torch_utils",
        cause="vLLM 0.11.1 has moved its helpers for torch to vllm.utils.torch_utils, and LMCache 0.3.8 imports them "
        "from there alone. 0.3.9 and newer try both places.",
        now="pip install --upgrade --no-deps lmcache==0.3.9.post2 (vLLM 0.11.0), or vLLM 0.11.1 and newer",
        good="LMCache 0.3.9 or newer",
        threads=(_LMCACHE + "issues/1840",),
    ),
    Problem(
        code="KVD362",
        name="lmcache-before-cached-request-data",
        severity=Severity.CRASH,
        title="This LMCache takes cached requests as a list, which vLLM no longer hands over.",
        shows=(
            Failed(kind="TypeError", text="'CachedRequestData' object is not iterable"),
            Failed(kind="AttributeError", text="'CachedRequestData' object has no attribute 'req_id'"),
        ),
        sentence="vLLM is 0.9.2 or newer, and LMCache older than that",
        cause="vLLM has one CachedRequestData for all requests from 0.9.2 on; before it was a list of them. LMCache "
        "0.3.1 reads only the list.",
        now="pip install --no-deps lmcache==0.3.9.post2 (or newer, of this torch and CUDA) beside vLLM 0.9.2 or "
        "newer, and restart",
        good="LMCache 0.3.9 or newer, which reads both forms",
        threads=(_LMCACHE + "issues/1003",),
    ),
    Problem(
        code="KVD491",
        name="native-operations-incomplete",
        severity=Severity.CRASH,
        title="LMCache's compiled operations are missing or older than its Python code.",
        shows=(
            Failed(kind="AttributeError", text="module 'lmcache.python_ops_fallback' has no attribute '<what>'"),
            Failed(kind="AttributeError", text="module 'lmcache.non_cuda_equivalents' has no attribute '<what>'"),
            Failed(kind="AttributeError", text="module 'lmcache.c_ops' has no attribute '<what>'"),
            Failed(kind="AttributeError", text="module 'lmcache.xpu_ops' has no attribute '<what>'"),
        ),
        sentence="{what} is not there",
        cause="`fallback` or `non_cuda_equivalents`: lmcache.c_ops did not load (a WARNING at the start says why), "
        "and the Python code in its place has not all of it. c_ops itself: sources were updated (git pull, pip "
        "install -e) and not compiled anew.",
        now="python -c 'import torch, lmcache.c_ops' shows why it does not load; pip install --force-reinstall "
        "--no-deps lmcache of this release, or from source: pip install -e . --no-build-isolation again",
        good="a wheel for this torch and CUDA",
        threads=("https://github.com/LMCache/LMCache/issues/3468",),
    ),
    Problem(
        code="KVD492",
        name="step-metadata-of-other-release",
        severity=Severity.CRASH,
        title="The worker reads something in a step's message that the scheduler side did not put there.",
        shows=(
            Failed(kind="AttributeError", text="'LMCacheConnectorMetadata' object has no attribute '<what>'"),
            Failed(kind="AttributeError", text="'LMCacheMPConnectorMetadata' object has no attribute '<what>'"),
            Failed(kind="AttributeError", text="'ReqMeta' object has no attribute '<what>'"),
            Failed(
                kind="AttributeError",
                source="lookup_unpin(metadata.lookup_requests_in_step)",
                within="vllm_v1_adapter.py:start_load_kv",
            ),
        ),
        cause="Scheduler and worker run different code of the connector: two releases of LMCache on the nodes of one "
        "engine, or vLLM's own copy on one side (kv_connector_module_path). lookup_requests_in_step: an LMCache of "
        "July 2025 (0.3.3 development) whose messages of empty steps lack it.",
        now="pip show lmcache on every node and in every image of the engine; the same release everywhere; restart all",
        good="LMCache 0.3.9 or newer everywhere",
        threads=("https://github.com/LMCache/LMCache/pull/1120",),
    ),
    Problem(
        code="KVD1130",
        name="step-message-of-another-class",
        severity=Severity.CRASH,
        title="The worker's connector got a message of the step that is of another class, or none.",
        shows=(
            Failed(kind="AssertionError", source="isinstance(metadata, LMCacheConnectorMetadata)"),
            Failed(kind="AssertionError", source="isinstance(connector_metadata, LMCacheConnectorMetadata)"),
            Failed(kind="AssertionError", source="isinstance(metadata, LMCacheMPConnectorMetadata)"),
        ),
        sure=False,
        cause="Two classes of the same name are loaded: the connector of vLLM's own copy (lmcache_integration, "
        "use_native) on one side and that of the lmcache package, or kv_connector_module_path, on the other. Or a "
        "wrapper (MultiConnector, a connector of your own) handed on another connector's message.",
        now='one connector by its name, {"kv_connector": "LMCacheConnectorV1"} or "LMCacheMPConnector", without '
        "kv_connector_module_path and use_native, and the same lmcache on all nodes (pip show lmcache); restart all",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1342",
        name="step-without-attention-metadata",
        severity=Severity.RISK,
        title="A step has no attention metadata, and LMCache loads nothing in it.",
        shows=(Logged("In connector.start_load_kv, but the attn_metadata is None"),),
        releases={"lmcache": "<0.3.9"},
        cause="vLLM 0.9 calls the connector also in steps that compute nothing (profiling, a request that only loads). "
        "Before 0.3.9 LMCache warns of each; later it is a line at DEBUG. By itself it does no harm; lines that tokens "
        "are missing after it are another matter.",
        now="nothing, if no line says that tokens are missing; else pip install --no-deps lmcache==0.3.9.post2",
        fixed={"lmcache": "0.3.9"},
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/749",),
    ),
    Problem(
        code="KVD1281",
        name="preemptions-come-as-metadata",
        severity=Severity.CRASH,
        title="This vLLM hands handle_preemptions the connector's metadata, and the connector expects request ids.",
        shows=(
            Failed(kind="TypeError", text="ConnectorMetadata' object is not iterable", within="handle_preemptions"),
        ),
        sentence="handle_preemptions gets the metadata of the step",
        releases={"vllm": ">=0.20"},
        cause="Up to vLLM 0.15 the hook got a set of the ids of preempted requests, in 0.20 and newer it gets the "
        "metadata, at every step. A connector of one's own or of a platform (LMCache-Ascend) still takes ids.",
        now="the release of that connector that is made for this vLLM, or vLLM 0.15.1; in the connector: "
        "`def handle_preemptions(self, kv_connector_metadata)`",
        good="a connector that is released for this vLLM: check it at each change of vLLM's release",
        threads=("https://github.com/LMCache/LMCache-Ascend/pull/293",),
    ),
)
