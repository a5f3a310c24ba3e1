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
    Problem(
        code="KVD1124",
        name="lmcache-asserts-in-v0",
        severity=Severity.CRASH,
        title="A worker of vLLM's V0 engine failed an assertion in a step, with LMCache's connector of that time.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Error in model execution (input dumped to <file>)",
                within="model_runner_base.py:_wrapper",
            ),
        ),
        sentence="an assertion without a text failed in the model's step",
        connectors=("LMCacheConnector",),
        sure=False,
        cause="LMCache's adapter for V0 (vllm_adapter.py) asserts what a batch looks like: with --tensor-parallel-size "
        "above 1 only the driver's worker has all of it, and with many requests at once some are chunked or mixed. "
        "Without a line of LMCache around it is vLLM's own assertion.",
        now="LMCacheConnectorV1 with VLLM_USE_V1=1 (vLLM 0.9 or newer); on V0 --tensor-parallel-size 1 and "
        "--enable-chunked-prefill false, or without --kv-transfer-config",
        good="vLLM 0.11.2 or newer, which has no V0, with LMCacheConnectorV1",
        threads=tuple(f"https://github.com/LMCache/LMCache/issues/{number}" for number in (355, 411, 439, 488)),
    ),
    Problem(
        code="KVD1850",
        name="v0-calls-an-older-lmcache",
        severity=Severity.CRASH,
        title="vLLM's V0 engine makes LMCache's connector as another release of LMCache wanted it.",
        shows=(
            Failed(kind="TypeError", text="init_lmcache_engine() missing", within="lmcache_connector.py:__init__"),
            Failed(kind="TypeError", text="init_lmcache_engine() takes", within="lmcache_connector.py:__init__"),
        ),
        cause="LMCacheConnector, the connector of V0, is a part of vLLM (up to 0.10), and calls "
        "LMCache's vllm_adapter.py, which has changed its arguments since. VLLM_USE_V1=0, or something that V1 did not "
        "have yet, made vLLM take V0.",
        now='the V1 engine: no VLLM_USE_V1=0, and --kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1",'
        '"kv_role":"kv_both"}\'; on V0 only the LMCache of the time of that vLLM',
        good="vLLM 0.11.2 or newer, which has no V0, with LMCacheConnectorV1",
        threads=("https://github.com/LMCache/LMCache/issues/860",),
    ),
    Problem(
        code="KVD1126",
        name="images-without-their-tokens",
        severity=Severity.CRASH,
        title="A batch has images whose placeholder tokens are gone: LMCache in V0 cut them off.",
        shows=(Failed(kind="ValueError", text="<many> multimodal tokens to 0 placeholders"),),
        sentence="images are handed to the model, and none of their tokens",
        connectors=("LMCacheConnector", "LMCacheConnectorV1"),
        sure=False,
        cause="LMCache's adapter for V0 leaves out the tokens whose KV it has injected (`Rebuilt the input!`) and "
        "hands on the images all the same. Without that line before it, it is vLLM's own: a prompt whose chat "
        "template puts in no image token.",
        now="LMCacheConnectorV1 with VLLM_USE_V1=1 (vLLM 0.9 or newer); on V0 no images with --kv-transfer-config",
        good="vLLM 0.11.2 or newer, which has no V0, with LMCacheConnectorV1",
        threads=("https://github.com/LMCache/LMCache/issues/432",),
    ),
    Problem(
        code="KVD1146",
        name="kv-cache-of-two-dimensions-in-v0",
        severity=Severity.CRASH,
        title="A connector of vLLM's V0 engine takes a KV cache of four dimensions for granted, and this one has two.",
        shows=(
            Failed(
                kind="ValueError",
                text="Error in model execution (input dumped to <file>): not enough values to unpack (expected 4, got "
                "2)",
            ),
        ),
        sentence="the KV cache of a layer is one row for each block",
        sure=False,
        cause="SimpleConnector (PyNcclConnector, MooncakeConnector of V0) read the numbers of heads and their size "
        "from "
        "the cache's shape. XFormers and other backends (GPUs before Ampere, CPU) keep it flat.",
        now="a GPU of compute capability 8 or newer with VLLM_ATTENTION_BACKEND=FLASH_ATTN; or vLLM 0.6.5 or newer, "
        "which asks the model for them",
        good="vLLM 0.11.2 or newer with NixlConnector",
        threads=("https://github.com/vllm-project/vllm/pull/11058",),
    ),
    Problem(
        code="KVD1257",
        name="deepseek-with-a-v0-connector",
        severity=Severity.CRASH,
        title="P/D of vLLM's V0 engine does not know DeepSeek's models.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'Deepseek<version>Model' object has no attribute 'config'",
                through="/kv_transfer/",
            ),
        ),
        sentence="the connector asks a model for a config that it does not keep",
        releases={"vllm": "<0.9"},
        cause="SimpleConnector (PyNcclConnector, MooncakeConnector of V0) reads heads and layers from model.config, "
        "which DeepSeek's model does not keep, and takes keys and values for granted where MLA has one latent. Pull "
        "14824 brought both.",
        now="vLLM 0.9 or newer; until then DeepSeek without --kv-transfer-config, or another model",
        good="vLLM 0.11.2 or newer with NixlConnector",
        threads=(
            "https://github.com/vllm-project/vllm/issues/14324",
            "https://github.com/vllm-project/vllm/pull/14824",
        ),
    ),
)
