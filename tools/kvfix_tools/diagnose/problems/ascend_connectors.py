"""Connectors of vllm-ascend and LMCache-Ascend: LLMDataDist, layer-wise Mooncake, CPU offload, and CANN below them."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ASCEND = "https://github.com/vllm-project/vllm-ascend/"
_LMCACHE_ASCEND = "https://github.com/LMCache/LMCache-Ascend/issues/"
_CAPTURED = "the current capture mode does not support this operation"
_OF_A_RELEASE = "the vLLM that this release of vllm-ascend is made for: its own image holds both"
_OTHERS = "could not broadcast input array from shape (<caches>,) into shape (<room>,)"

PROBLEMS = (
    Problem(
        code="KVD118",
        name="llmdatadist-link-failed",
        severity=Severity.HANG,
        title="LLMDataDist cannot link an NPU of decode with one of prefill.",
        shows=(
            Failed(kind="LLMException", text="LLM_LINK_FAILED"),
            Failed(kind="LLMException", text="[link] failed, error code is <status>,"),
        ),
        sure=False,
        cause="The link goes over the NPUs' own network, by the device IPs of the rank table. An IP there is not the "
        "NPU's (`hccn_tool -i 0 -ip -g`), the two do not reach each other, or TLS is on at one of them only.",
        now="on every node for each NPU: `hccn_tool -i 0 -ip -g`, `hccn_tool -i 0 -ping -g address PEER_DEVICE_IP`, "
        "`hccn_tool -i 0 -tls -g` (the same on both); make the rank table anew with gen_ranktable.sh; NPUs of one "
        "node: `export HCCL_INTRA_ROCE_ENABLE=1`; larger HCCL_CONNECT_TIMEOUT",
        good="a rank table of today's device IPs; vllm-ascend's MooncakeConnectorV1 needs none",
        threads=(_ASCEND + "issues/2900", _ASCEND + "issues/2399"),
    ),
    Problem(
        code="KVD119",
        name="llmdatadist-not-started",
        severity=Severity.CRASH,
        title="LLMDataDist does not start on this NPU, and the worker does not either.",
        shows=(Failed(kind="LLMException", text="[LLMDataDist.init] failed, error code is <status>,"),),
        sentence="LLMDataDist answers {status}",
        sure=False,
        cause="CANN says why in its own log only. Of the options in the line: `llm.listenIpInfo` has to be this NPU's "
        "device IP with a port that is free, `ge.exec.deviceId` an NPU that no other process holds.",
        now="the first ERROR line of `/root/ascend/log/debug/plog/plog-PID_*.log` of that worker; `npu-smi info` for "
        "processes of before; `hccn_tool -i 0 -ip -g` against the rank table",
        good="the set-up that plog asks for",
        threads=(_ASCEND + "issues/696",),
    ),
    Problem(
        code="KVD120",
        name="ascend-device-ip-unknown",
        severity=Severity.WRONG,
        title="HCCL does not know the NPUs' IP addresses, so no KV is moved between the nodes.",
        shows=(
            Logged("'device_ip' is not set correctly"),
            Logged("'device ip' is not set correctly"),
            Logged("device_ip is not set correctly"),
        ),
        cause="Mooncake and HCCL read the NPUs' addresses from /etc/hccn.conf, and the container has no such file. "
        "The engines start all the same: transfers fail, and answers may begin wrongly and repeat.",
        now="`docker run ... -v /etc/hccn.conf:/etc/hccn.conf -v "
        "/usr/local/Ascend/driver/tools/hccn_tool:/usr/local/Ascend/driver/tools/hccn_tool` for prefill and decode; "
        "`hccn_tool -i 0 -ip -g` inside has to print an address",
        good="the same; no release checks it at start",
        threads=(_ASCEND + "issues/7711", _ASCEND + "issues/4866"),
    ),
    Problem(
        code="KVD121",
        name="ascend-copy-in-captured-graph",
        severity=Severity.CRASH,
        title="A copy was made while an ACL graph was captured or replayed, which CANN refuses.",
        shows=(
            Logged(f"rtMemcpy execution failed, reason={_CAPTURED}"),
            Logged(f"desc=[{_CAPTURED}]"),
            Failed(text=_CAPTURED),
        ),
        sure=False,
        cause="Reported for decode with MooncakeConnectorV1, `use_ascend_direct` and FULL_DECODE_ONLY graphs: KV "
        "arrives by itself while the whole step is one graph.",
        now='on decode `--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'`, or `--enforce-eager`; restart',
        good="no release of vllm-ascend is known to switch to PIECEWISE by itself",
        threads=(_ASCEND + "issues/8992",),
    ),
    Problem(
        code="KVD122",
        name="ascend-layerwise-blocks-differ",
        severity=Severity.CRASH,
        title="Prefill has fewer blocks to send layer by layer than decode waits for.",
        shows=(
            Failed(kind="AssertionError", text="len of local trans block ids : <local> not equal to the len of remote"),
            Logged("len of local trans block ids : <local> not equal to the len of remote trans block ids : <remote>"),
            Failed(within="mooncake_layerwise_connector.py:add_tranfer_task"),
        ),
        cause="MooncakeLayerwiseConnector sends blocks as they are computed. Blocks that another connector beside it "
        "(AscendStoreConnector) or prefill's own prefix cache has are not computed, and decode wants all of them.",
        now="MooncakeConnectorV1 in place of MooncakeLayerwiseConnector where AscendStoreConnector stands beside it; "
        "or MooncakeLayerwiseConnector alone with `--no-enable-prefix-caching` on prefill",
        good="MultiConnector of MooncakeConnectorV1 and AscendStoreConnector",
        threads=(_ASCEND + "issues/7085",),
    ),
    Problem(
        code="KVD123",
        name="mooncake-segment-memory-refused",
        severity=Severity.CRASH,
        title="Mooncake's transport cannot register memory: a store's segment or the KV cache.",
        shows=(
            Logged("Register mem ret:<code>"),
            Logged("register_local_memory_failed"),
            Logged("Failed to mount segment: INVALID_PARAMS"),
        ),
        replaces=("KVD507",),
        cause="The master is not asked at all. On Ascend `Register mem ret` has the reason: 207000 is a feature that "
        "the driver lacks (`ASCEND_ENABLE_USE_FABRIC_MEM=1` needs HDK 26.0.0, CANN 9.0.0 and LingQu CC 1.5.0 or "
        "newer); 103900 memory of an allocator that cannot be shared (rfork weights, expandable segments, sleep "
        "mode), or HCCL of another CANN. With RDMA: locked memory is limited.",
        now="Ascend 207000: newer HDK and CANN, or `unset ASCEND_ENABLE_USE_FABRIC_MEM`; 103900: `unset "
        "PYTORCH_NPU_ALLOC_CONF`, without --load-format rfork and --enable-sleep-mode; RDMA: container with "
        "`--ulimit memlock=-1`; else a smaller global_segment_size; restart",
        good="drivers that have what the settings ask for",
        threads=(_ASCEND + "issues/8420",),
    ),
    Problem(
        code="KVD124",
        name="ascend-recompute-scheduler-of-another-vllm",
        severity=Severity.CRASH,
        title="vllm-ascend's recompute scheduler is made for another vLLM.",
        shows=(
            Failed(kind="AttributeError", within="recompute_scheduler.py:update_from_output"),
            Failed(kind="AttributeError", within="recompute_scheduler.py:schedule"),
            Failed(kind="AttributeError", within="recompute_scheduler.py:__init__"),
            Failed(kind="TypeError", within="recompute_scheduler.py:__init__"),
            Failed(kind="TypeError", within="recompute_scheduler.py:schedule"),
        ),
        cause="It is a copy of vLLM's scheduler, and names of the two differ from release to release (vLLM 0.22: "
        "discard_latest_async_tokens became async_tokens_to_discard). The first request kills decode.",
        now="`--additional-config '{\"recompute_scheduler_enable\": false}'` on decode; or " + _OF_A_RELEASE,
        good=_OF_A_RELEASE,
        threads=(_ASCEND + "issues/14871", _ASCEND + "pull/6286"),
    ),
    Problem(
        code="KVD125",
        name="ascend-cpu-offload-connector",
        severity=Severity.CRASH,
        title="vllm-ascend's CPUOffloadingConnector does not start with this release.",
        shows=(
            Failed(within="cpu_offload_connector.py:get_kv_cache_spec"),
            Failed(within="cpu_offload_connector.py:register_kv_caches"),
            Failed(within="cpu_offload_manager/metadata.py:__init__"),
        ),
        cause="It holds a copy of the model runner's get_kv_cache_spec, which vLLM and vllm-ascend have changed since "
        "(repaired in January 2026 by pull request 4311, and reported broken after it too).",
        now='instead of it `--kv-transfer-config \'{"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"block_size":128,"num_cpu_blocks":1000,"spec_name":"NPUOffloadingSpec",'
        '"spec_module_path":"vllm_ascend.kv_offload.npu"}}\'`',
        good="AscendStoreConnector; NPUOffloadingSpec is reported broken from vllm-ascend 0.20 on (pull request 10575)",
        threads=(_ASCEND + "issues/4891", _ASCEND + "issues/5948", _ASCEND + "pull/4311", _ASCEND + "issues/10496"),
    ),
    Problem(
        code="KVD126",
        name="lmcache-ascend-without-mla",
        severity=Severity.CRASH,
        title="This LMCache-Ascend takes a layer's KV for one tensor, and vllm-ascend gives MLA's as a tuple.",
        shows=(
            Failed(kind="AttributeError", text="'tuple' object has", within="npu_connector.py:<listcomp>"),
            Failed(kind="AttributeError", text="'tuple' object has", within="npu_connector.py:_initialize_pointers"),
            Failed(kind="AttributeError", text="'tuple' object has", within="npu_connector.py:initialize_kvcaches_ptr"),
        ),
        cause="DeepSeek and other models with MLA keep the latent and the rotary part in two tensors on NPUs, and with "
        "sparse attention in a third. Releases of 2025 (LMCache 0.3) know no such layout; later ones find it out by "
        "themselves (MLA_KV, DSA_KV in lmcache_ascend/v1/kv_format.py). Taking the first alone loses the other.",
        now="an LMCache-Ascend whose lmcache_ascend/v1/kv_format.py has MLA_KV, with the vllm-ascend and LMCache that "
        "its README names; until then without LMCache for this model: `AscendStoreConnector` of vllm-ascend",
        good="that LMCache-Ascend; or LMCacheMPConnector with LMCache 0.5.6, which knows the layout "
        "(NL_X_NP_X_NB_BS_ONE_HS)",
        replaces=("KVD1110",),
        threads=(_LMCACHE_ASCEND + "12", _LMCACHE_ASCEND + "149", "https://github.com/LMCache/LMCache/pull/5138"),
    ),
    Problem(
        code="KVD1682",
        name="ascend-handshake-answered-with-an-error",
        severity=Severity.HANG,
        title="The peer of LMCache-Ascend's HCCL channel answers a handshake with an error, and no KV goes over.",
        shows=(
            Failed(kind="AttributeError", text="'HcclErrorResponse' object has no attribute"),
            Logged("Failed to process hccl initialization loop: <error>"),
        ),
        sure=False,
        cause="`server_mem_handle_bytes`, and the peer's `Failed to process hccl initialization loop` has but a name: "
        "memory was to be registered before the peer's thread had accepted the connection, a race. Another error there "
        "is the cause itself.",
        now="an LMCache-Ascend with its pull request 266 (July 2026) on both sides; until then restart the prefiller, "
        "and send the request again",
        good="an LMCache-Ascend with pull request 266",
        threads=(_LMCACHE_ASCEND + "263", "https://github.com/LMCache/LMCache-Ascend/pull/266"),
    ),
    Problem(
        code="KVD1684",
        name="ascend-caches-are-not-its-layers",
        severity=Severity.CRASH,
        title="The model has another number of KV caches than LMCache-Ascend has room for.",
        shows=(
            Failed(kind="ValueError", text=_OTHERS, within="npu_connector.py:_initialize_pointers"),
            Failed(kind="ValueError", text=_OTHERS, within="npu_connectors.py:_initialize_pointers"),
        ),
        sentence="vLLM has registered {caches} tensors, LMCache-Ascend has room for {room}",
        sure=False,
        cause="K and V of a layer count as two. About half of the room: for the draft model (MTP, GLM-4.7-Flash) "
        "LMCache counted all layers of the model again. More than the room: a draft model was not counted, or there is "
        "a cache of an indexer beside each layer.",
        now="without --speculative-config; if there is none, without LMCache for this model: AscendStoreConnector of "
        "vllm-ascend",
        good="no release of LMCacheConnectorV1 counts them right (0.5.6)",
        threads=(_LMCACHE_ASCEND + "211",),
    ),
    Problem(
        code="KVD061",
        name="lmcache-ascend-of-another-lmcache",
        severity=Severity.CRASH,
        title="LMCache-Ascend is made for another LMCache than the one installed.",
        shows=(
            Failed(kind="AttributeError", text="'Ascend<what>' object has no attribute"),
            Failed(kind="AttributeError", text="'NPU<what>' object has no attribute", through="lmcache"),
            Failed(kind="AttributeError", text="module 'lmcache<module>' has no attribute", through="lmcache_ascend/"),
            Failed(kind="TypeError", text="unexpected keyword argument", through="lmcache_ascend/"),
            Failed(kind="TypeError", text="missing <count> required positional argument", through="lmcache_ascend/"),
            Failed(kind="ImportError", text="cannot import name", through="lmcache_ascend/"),
            Failed(kind="ModuleNotFoundError", text="No module named 'lmcache.", through="lmcache_ascend/"),
        ),
        cause="Its classes are built upon LMCache's own and override a part of each; LMCache changes what they "
        "inherit from one release to the next.",
        now="pip list | grep -i lmcache; install the LMCache that the release of LMCache-Ascend names in its README "
        "(`pip install lmcache==<that release>`), or the LMCache-Ascend branch of this LMCache; restart",
        good="both of one release",
        threads=(_LMCACHE_ASCEND + "264",),
    ),
    Problem(
        code="KVD1076",
        name="ascend-pool-without-mooncake-file",
        severity=Severity.CRASH,
        title="vllm-ascend's KV pool is to use Mooncake, and no file of settings is named.",
        shows=(
            Failed(
                kind="ValueError",
                text="The environment variable 'MOONCAKE_CONFIG_PATH' is not set.",
                through="vllm_ascend/",
            ),
        ),
        sentence="MOONCAKE_CONFIG_PATH is not set in the worker",
        replaces=("KVD890",),
        cause="AscendStoreConnector reads Mooncake's settings from that file, in each worker's environment. Until "
        'vllm-ascend\'s pull request 6229 (January 2026) it did so with `"backend": "memcache"` too.',
        now='export MOONCAKE_CONFIG_PATH=/path/mooncake.json with {"metadata_server": "P2PHANDSHAKE", "protocol": '
        '"ascend", "device_name": "", "use_ascend_direct": true, "master_server_address": "HOST:50088", '
        '"global_segment_size": 40000000000}; for memcache "backend": "memcache" and MMC_LOCAL_CONFIG_PATH instead; '
        "restart",
        good="the setting in the start script; for memcache a vllm-ascend with pull request 6229",
        threads=(_ASCEND + "pull/6229",),
    ),
    Problem(
        code="KVD1078",
        name="ascend-memcache-not-started",
        severity=Severity.CRASH,
        title="MemCache, the store behind vllm-ascend's KV pool, does not start in a worker.",
        shows=(
            Failed(kind="AssertionError", source="assert res == 0", within="memcache_backend.py:__init__"),
            Failed(kind="ImportError", text="Please install memcache by following the instructions"),
            Logged("Please install memcache by following the instructions"),
        ),
        sentence="the store of memcache_hybrid is not made",
        cause="memcache_hybrid is not installed, or its init() answers an error: no huge pages, no meta service at the "
        "address of mmc-local.conf, another world size there than ranks that start, or its environment is not "
        "sourced. Its own log (MMC) says which.",
        now="pip list | grep -i memcache; source /usr/local/memfabric_hybrid/set_env.sh and "
        "/usr/local/memcache_hybrid/set_env.sh; export MMC_LOCAL_CONFIG_PATH=/usr/local/memcache_hybrid/latest/config/"
        "mmc-local.conf; echo 200000 > /proc/sys/vm/nr_hugepages on the host; start the meta service first",
        good="the same in the start script, as vllm-ascend's guide of the KV pool has it",
        sure=False,
        threads=(_ASCEND + "pull/6229",),
    ),
)
