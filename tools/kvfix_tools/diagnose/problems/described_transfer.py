"""P/D transfer as reports describe it, without a line of its own; and what routers and Dynamo refuse."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem, either

_ISSUES = "https://github.com/vllm-project/vllm/issues"
_PULLS = "https://github.com/vllm-project/vllm/pull"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues"
_STACK = "https://github.com/vllm-project/production-stack/issues"

PROBLEMS = (
    Problem(
        code="KVD1360",
        name="transfer-of-the-v0-engine",
        severity=Severity.HANG,
        title="Prefill and decode are connected as vLLM's old V0 engine did it, in lockstep and one to one.",
        shows=(),
        said=(
            r"PyNcclConnector|disagg_performance_benchmark|disaggregated_prefill\.(?:py|sh)|disaggregted_prefill\.sh",
            r"(?i)\bhung\b|\bhangs?\b|stuck|block(?:ed|ing)\b|no longer respond|\u5361\u4f4f|\bfail|nonsens|incorrect|"
            r"irrelevant",
        ),
        releases={"vllm": "<0.11"},
        cause="The V0 engine's pipe pairs one prefill engine (kv_producer, kv_rank 0) with one decode engine "
        "(kv_consumer, kv_rank 1): the same kv_port and kv_parallel_size 2, the same tensor parallel size, and each "
        "request in the same order on both. A client that goes away, a request of which only one side hears, many at "
        "once, or two engines of the same role, and both wait for each other. Other causes of wrong text (float16 on a "
        "V100) are possible; V0 got no fixes any more.",
        now='the V1 engine: vLLM 0.11 or newer with \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\' on both '
        "and its proxy; on V0 one producer of rank 0, one consumer of rank 1, one request at a time",
        good="vLLM 0.11 or newer, which has no V0",
        sure=False,
        threads=(
            f"{_ISSUES}/11445",
            f"{_ISSUES}/11490",
            f"{_ISSUES}/11247",
            f"{_ISSUES}/17808",
            "https://github.com/MetaX-MACA/vLLM-metax/issues/10",
        ),
    ),
    Problem(
        code="KVD1362",
        name="dynamo-wants-the-whole-transfer-configuration",
        severity=Severity.CRASH,
        title="Dynamo's vLLM worker is to do prefill or decode, and was not told by which connector.",
        shows=(
            Failed(kind="ValueError", text="--connector is deprecated and the default is no longer nixl"),
            Logged("--connector is deprecated and the default is no longer nixl"),
        ),
        sentence="--disaggregation-mode without --kv-transfer-config",
        cause="Earlier releases of Dynamo put NixlConnector there by themselves (`--connector nixl`).",
        now='--kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\' for each worker with '
        "--disaggregation-mode, prefill and decode alike",
        good="the configuration; examples of Dynamo's own release",
        threads=(
            "https://github.com/ai-dynamo/dynamo/pull/6893",
            "https://github.com/ai-dynamo/dynamo/pull/6897",
            "https://github.com/ai-dynamo/dynamo/issues/11467",
        ),
    ),
    Problem(
        code="KVD1364",
        name="encoder-cache-without-a-size",
        severity=Severity.CRASH,
        title="ECCPUConnector was not told how much memory it may take.",
        shows=(
            Failed(
                kind="ValueError",
                text="ec_cpu_bytes must be specified in ec_connector_extra_config",
                at="vllm/distributed/ec_transfer/ec_connector/cpu/common.py",
            ),
        ),
        sentence="ec_cpu_bytes is missing",
        releases={"vllm": ">=0.26"},
        cause="The size has no default; `num_ec_blocks` of earlier builds is not read any more.",
        now='`"ec_connector_extra_config": {"ec_cpu_bytes": 4294967296}` in --ec-transfer-config of encoder and '
        "prefill, restart",
        good="the configuration",
        threads=("https://github.com/llm-d/llm-d/pull/2435",),
    ),
    Problem(
        code="KVD1366",
        name="loads-hold-all-blocks",
        severity=Severity.HANG,
        title="Requests whose load is done or begun hold the blocks that the others need, and none runs.",
        shows=(),
        said=(
            r"(?i)\bdead-?locks?\b|\brunning\b\W{0,3}\b0\b|lock(?:s|ed)? out",
            r"(?i)kv[- ]?(?:cache)? (?:pressure|exhaust)|blocks? (?:the|that) (?:head|other)",
            r"(?i)offloading|kv[-_ ]?connector|remote_kvs|p/d",
        ),
        releases={"vllm": "<0.34"},
        cause="A load holds its blocks and cannot be preempted. If loads are admitted until the last block is taken, "
        "no request gets the one more that it needs to start, and one that cannot start stands before those that could "
        "(KVF903). Most of it ends with vLLM 0.32; what is left are the priority policy (KVF208), sliding windows "
        "(KVF210) and sessions (KVF219).",
        now='vLLM 0.32 or newer with KVFIX="fix plus=KVF208,KVF219" (KVF210 is a default fix); until then fewer '
        "requests at once (`--max-num-seqs`), more blocks (`--gpu-memory-utilization`), no --scheduling-policy "
        "priority; restart what stands",
        good="vLLM 0.32 or newer with kvfix",
        sure=False,
        threads=(f"{_ISSUES}/45388", f"{_ISSUES}/45387"),
    ),
    Problem(
        code="KVD1368",
        name="blocks-are-kept-for-days",
        severity=Severity.LEAK,
        title="Prefill keeps the KV of a request that decode never fetches for hours: the time for it is in seconds.",
        shows=(),
        said=(
            r"(?:VLLM_(?:NIXL|MOONCAKE)_ABORT_REQUEST_TIMEOUT|kv_lease_duration)[^\n\d.]{1,24}\d{5,}(?![\d.])",
            r"(?i)exhaust|(?:not|never|n't) (?:be )?(?:freed|releas)|out of (?:kv )?blocks|\u4e0d\u91ca\u653e"
            r"|\u8017\u5c3d",
        ),
        cause="`VLLM_NIXL_ABORT_REQUEST_TIMEOUT` and its kin are seconds, and 300000 of them are 83 hours. A request "
        "that fails or is aborted on decode leaves its blocks in prefill's memory for so long, until none is free and "
        "all wait.",
        now="VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480 (its default; seconds) for prefill, restart it; longer than the "
        "longest wait of a request in decode's queue, and no more",
        good="the configuration",
        sure=False,
        threads=(f"{_ASCEND}/13240",),
    ),
    Problem(
        code="KVD1370",
        name="pool-with-pipeline-stages-on-ascend",
        severity=Severity.SLOW,
        title="AscendStoreConnector cannot write the chunks of a later pipeline stage into its pool.",
        shows=(),
        said=(r"AscendStore", r"pp_rank\W{0,3}[1-9]", r"(?i)TRANSFER_FAIL|put\b[^\n]{0,40}\bfail"),
        cause="Seen with --pipeline-parallel-size 2 on prefill and the pool in a MultiConnector: keys of stage 0 are "
        "written, those of stage 1 end with TRANSFER_FAIL. The same engines run with the pool and one stage, and with "
        "two stages and no pool. A link that fails has it for keys of both stages.",
        now="--pipeline-parallel-size 1 on prefill (more tensor or data parallelism in its place), or "
        "MooncakeConnectorV1 without AscendStoreConnector",
        good="one stage with the pool, until vllm-ascend#11478 says otherwise",
        sure=False,
        threads=(f"{_ASCEND}/11478",),
    ),
    Problem(
        code="KVD1372",
        name="router-reads-old-dynamic-configuration",
        severity=Severity.CRASH,
        title="The production stack's router cannot use its dynamic configuration, and has no engines to send to.",
        shows=(Logged("StaticServiceDiscovery.__init__() missing"),),
        sentence="StaticServiceDiscovery lacks arguments",
        cause="The file of --dynamic-config-json reaches a router whose StaticServiceDiscovery takes more arguments "
        "than the watcher of that build hands on. It is the router's own, and not vLLM's release.",
        now="the same as options of the router (`--service-discovery static --static-backends http://A:8000,... "
        "--static-models NAME,...`) without --dynamic-config-json, or the router of a tagged release",
        good="a router of a tagged release",
        sure=False,
        threads=(f"{_STACK}/617",),
    ),
    Problem(
        code="KVD1374",
        name="router-older-than-its-chart",
        severity=Severity.CRASH,
        title="The router does not know an option that its chart gives it.",
        shows=(
            Logged("error: unrecognized arguments: --k8s-service-discovery-type"),
            Logged("error: unrecognized arguments: --prefill-model-labels"),
        ),
        cause="The image of the router is older than the Helm chart or the guide: a tag that is fixed in the values, "
        "or one that the node has cached.",
        now="routerSpec: {tag: latest, imagePullPolicy: Always} (or the tag of the chart's release) in the chart's "
        "values; helm upgrade",
        good="chart and router of one release",
        threads=(f"{_STACK}/746",),
    ),
    Problem(
        code="KVD1376",
        name="text-after-a-failed-read-of-groups",
        severity=Severity.WRONG,
        title="A read of NIXL fails for a model with several KV groups, and the answer goes on with wrong text.",
        shows=(),
        said=(
            r"(?i)nixl",
            r"(?i)\bHMA\b|hybrid|deepseek[- ]?v4|several (?:kv )?groups",
            r"(?i)fail(?:ed|ure|s)?\b",
            r"(?i)corrupt|garbage|garbled|gibberish|wrong (?:tokens|text)",
        ),
        releases={"vllm": ">=0.20,<0.32"},
        cause="NixlConnector reports the blocks of a read that failed where the model has one KV group, and nothing "
        "where it has several (base_worker.py 0.26.0:2150): the request counts as received, whatever "
        "kv_load_failure_policy says, and goes on with what was in its blocks. HTTP 200 with wrong tokens, in "
        "`reasoning` where the model thinks. Why the read failed says `NIXL transfer failure` of that time.",
        now="restart both engines, and take `NIXL transfer failure` in decode's log for an alarm: each such request "
        "has a wrong answer",
        fixed={"vllm": "0.32.0"},
        sure=False,
        threads=(f"{_ISSUES}/52276",),
    ),
    Problem(
        code="KVD1378",
        name="proxy-of-another-connector",
        severity=Severity.SLOW,
        title="The proxy does not hand prefill's kv_transfer_params to decode, which computes the prompt again.",
        shows=(),
        said=(r"disagg_proxy_demo|disagg_prefill_proxy_server", r"Nixl(?:Push)?Connector"),
        cause="NixlConnector reads what the parameters in prefill's answer name. disagg_proxy_demo.py and "
        "disagg_prefill_proxy_server.py send the prompt to prefill with max_tokens 1, drop the answer, and send the "
        "same prompt to decode: the text is right, and prefill's work is for nothing.",
        now="python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py --prefiller-hosts A --prefiller-ports "
        "8100 --decoder-hosts B --decoder-ports 8200 (of vLLM's repository, of the same release), or a router that "
        "knows NixlConnector; `External prefix cache hit rate` of decode then is above 0",
        good="that proxy, or a router (llm-d, vLLM's own)",
        sure=False,
        threads=(f"{_ISSUES}/26896",),
    ),
    Problem(
        code="KVD1382",
        name="stages-have-other-counts-of-cpu-blocks",
        severity=Severity.WRONG,
        title="Pipeline stages have different numbers of CPU blocks, and the scheduler hands out those of the first.",
        shows=(),
        said=(
            r"(?i)offload",
            r"(?i)pipeline[-_ ]parallel|\bPP (?:ranks?|stages?|size)",
            r"(?i)\bnum_(?:cpu_)?(?:blocks|chunks)|(?:block|chunk)s?\b[^\n]{0,24}(?:mismatch|differ)",
        ),
        releases={"vllm": ">=0.20"},
        cause="Each process divides cpu_bytes_to_use by the size of its own layers' blocks "
        "(offloading/config.py 0.32.0:147, kv_offload/cpu/spec.py 0.32.0:119). Stages with more or larger layers have "
        "fewer blocks than the first stage, whose number the scheduler takes: it hands out blocks that they lack.",
        now="the same layers on each stage (VLLM_PP_LAYER_PARTITION), or --tensor-parallel-size in place of "
        "--pipeline-parallel-size, or without --kv-offloading-size; restart",
        good="no release up to 0.33.0 is right: equal stages (vllm#50653)",
        sure=False,
        threads=(f"{_PULLS}/50653",),
    ),
    Problem(
        code="KVD1386",
        name="proxy-asks-for-what-is-not-served",
        severity=Severity.CRASH,
        title="The proxy of P/D reaches a server that does not know its request: 404.",
        shows=either("Client error '404 Not Found' for url"),
        sentence="httpx says 404 Not Found",
        cause="Either what listens there is no vLLM (a sidecar, another service, another port of the pod), or vLLM "
        "does not serve the model of that name (its answer then says `does not exist`), or it serves no such path: a "
        "model that is no chat or generation model.",
        now="curl -s http://HOST:PORT/v1/models for each address that the proxy was given: vLLM answers with the names "
        "that it serves; `model` of the request has to be one of them, on prefill and decode alike "
        "(--served-model-name)",
        good="the addresses and one --served-model-name",
        sure=False,
        threads=("https://github.com/vllm-project/aibrix/issues/1357",),
    ),
)
