"""vllm-ascend's Mooncake connectors: what prefill, decode and proxy tell each other beside the KV."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_ASCEND = "https://github.com/vllm-project/vllm-ascend/"
#: Where these have their port: kv_port, then one for each rank.
_PORTS = (
    "every rank listens on kv_port + (data parallel rank x tensor parallel size) + its own rank, at the address of "
    "the node that vLLM takes for its own (VLLM_HOST_IP)"
)

PROBLEMS = (
    Problem(
        code="KVD023",
        name="ascend-side-channel-unanswered",
        severity=Severity.HANG,
        title="The other side of a vllm-ascend P/D pair does not answer on its side channel.",
        shows=(
            Logged("Query to port and kv base addr for request <request> fail with error: <reason>"),
            Logged("Query to port and kv base addr for request"),
            Logged("update_decoder_info with error: <reason>"),
            Logged("Receive failed from <peer> after all retries: <reason>"),
            Logged("Receive failed after all retries: <reason>"),
            Logged("Send failed after all retries: <reason>"),
            Failed(kind="RuntimeError", text="Failed to receive data from <peer> after"),
            Failed(kind="RuntimeError", text="Failed to receive data after"),
            Failed(kind="RuntimeError", text="Failed to send data to <peer> after"),
        ),
        cause=f"Before KV goes, the addresses of the other side's blocks are asked for by TCP: {_PORTS}. Nothing "
        "answered there: that engine is down or stands still, tp_size or dp_size in kv_connector_extra_config are not "
        "what it runs with (another port is asked), two engines of a host share kv_port ranges, or the port is closed.",
        now='nc -vz HOST PORT with both of the line; "prefill": {"dp_size":..,"tp_size":..}, "decode": {..} as the '
        "two engines run, the same on both; kv_port of engines on one host further apart than dp_size x tp_size x "
        "pp_size; export VLLM_HOST_IP=<address that the other node reaches>; restart both",
        good="one kv_connector_extra_config for both sides, and open ports",
        sure=False,
        threads=(_ASCEND + "issues/7401",),
    ),
    Problem(
        code="KVD024",
        name="ascend-done-signal-lost",
        severity=Severity.HANG,
        title="One side of a vllm-ascend P/D pair could not tell the other that a request's KV has been moved.",
        shows=(
            Logged("Sending done sending signal for request <request> to <peer> fail with error: <reason>"),
            Logged("Failed to send done sending signal for request <request> to"),
            Logged("Failed to receive ACK for request <request> from"),
            Failed(kind="RuntimeError", text="Failed to receive ACK"),
            Failed(kind="TimeoutError", text="Timed out waiting for ACK from <peer>"),
        ),
        cause="The KV itself was moved. The message after it got no ACK: the engine there died, restarted or stands "
        "still, or its port is asked wrongly. Layerwise (prefill sends): decode waits for ever for this request. "
        "Pull (decode reads): prefill keeps the blocks until its time limit (`Force freed expired request`).",
        now="that engine's log at this time; if it restarted: restart this one too; layerwise: restart decode (frees "
        'the requests that wait); the same "prefill" and "decode" sizes in kv_connector_extra_config on both sides',
        good="engines that stay; no release of vllm-ascend sends it again later",
        sure=False,
    ),
    Problem(
        code="KVD025",
        name="ascend-freed-before-decode-was-done",
        severity=Severity.RISK,
        title="Decode is done with a request's KV that prefill had freed already, or does not know.",
        shows=(
            Logged("MooncakeConnector finish req not in reqs to process"),
            Logged("HIXLConnector finish req not in reqs to process"),
        ),
        sure=False,
        cause="Prefill frees blocks that are not fetched within its time limit (480 s; `Force "
        "freed expired request` names them): what decode read after that is another request's KV. Without "
        "such a line the message came twice, or to the wrong rank, and is harmless.",
        now="grep 'Force freed' in prefill's log for the request; if there: fewer requests in decode's queue "
        "(--max-num-seqs, more decode), `export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=1800 "
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=1800` on prefill (older releases read the second)",
        good="decode fast enough for what prefill sends",
    ),
    Problem(
        code="KVD1885",
        name="ascend-engine-ids-collide",
        severity=Severity.HANG,
        title="Two engines of a vllm-ascend P/D set-up have one engine_id, or a request was sent to the wrong one.",
        shows=(
            Failed(kind="AssertionError", text="Conflict engine id <engine> with local engine id <own>"),
            Logged("Conflict engine id <engine> with local engine id <own>"),
            Failed(kind="RuntimeError", text="Remote metadata engine_id does not match the routed engine"),
            Logged("Remote metadata engine_id does not match the routed engine"),
        ),
        replaces=("KVD503",),
        cause="Decode asked the address of kv_transfer_params, and an engine with decode's own id, or not with that of "
        "the request, answered: `engine_id` of --kv-transfer-config is the same in two start scripts, prefill was "
        "restarted under that port, or the address is decode's own.",
        now='an `engine_id` of its own in --kv-transfer-config of each engine ("0", "1", ...), `export '
        "VLLM_HOST_IP=<address that the other node reaches>` on prefill, another kv_port for each engine of a host; "
        "restart all of them",
        good="ids that the deployment draws anew for each engine",
    ),
    Problem(
        code="KVD1886",
        name="ascend-layers-in-other-groups",
        severity=Severity.WRONG,
        title="Prefill and decode of vllm-ascend group their layers otherwise, and KV is read from the wrong place.",
        shows=(
            Logged("Remote kv_group2layeridx is inconsistent with local"),
            Failed(kind="RuntimeError", text="Remote kv_group2layeridx is inconsistent with the local layout"),
        ),
        replaces=("KVD503",),
        cause="Which layers make a KV group follows from model, draft layers (MTP), pipeline stages and release; one "
        "of these differs. Most releases only warn and read by their own grouping: answers are garbage. Later ones "
        "refuse the transfer.",
        now="the same image, --model, --speculative-config and --block-size on both sides; "
        '"prefill": {"pp_size": ..} in kv_connector_extra_config as prefill runs; restart both',
        good="one start script for both roles but for kv_role and sizes",
        sure=False,
    ),
    Problem(
        code="KVD1887",
        name="ascend-transfer-thread-failed",
        severity=Severity.HANG,
        title="The thread that moves KV in vllm-ascend's Mooncake connector failed at a request.",
        shows=(
            Logged("Error in KVCacheTransferThread: <error>"),
            Logged("Connection listener got exception <kind>: <error>"),
        ),
        quotes=True,
        sentence="{error}",
        cause="The error is of the connector's own code, or of what it calls; the thread goes on with other requests. "
        "This one keeps its blocks and waits, or (newer releases) is failed.",
        now="the traceback just before it; if it comes for each request: restart both engines, the same image and the "
        'same "prefill" and "decode" sizes in kv_connector_extra_config on both sides',
        good="what ends the error",
        sure=False,
    ),
    Problem(
        code="KVD1891",
        name="ascend-connector-moved",
        severity=Severity.CRASH,
        title="kv_connector_module_path names a module that this vllm-ascend has no more.",
        shows=(
            Failed(kind="ModuleNotFoundError", text="No module named 'vllm_ascend.distributed.mooncake_connector'"),
            Failed(kind="ModuleNotFoundError", text="No module named 'vllm_ascend.distributed.mooncake_layerwise"),
            Failed(kind="ModuleNotFoundError", text="No module named 'vllm_ascend.distributed.mooncake.<module>'"),
            Failed(kind="ModuleNotFoundError", text="No module named 'vllm_ascend.distributed.llmdatadist_<module>'"),
        ),
        cause="The connectors moved to vllm_ascend.distributed.kv_transfer and are registered by name there; "
        "LLMDataDist is gone. The start script is of an older release.",
        now="take `kv_connector_module_path` out of --kv-transfer-config on both sides; `kv_connector` "
        "MooncakeConnectorV1 (also for LLMDataDistCMgrConnector), MooncakeLayerwiseConnector, or AscendStoreConnector "
        "(for MooncakeConnectorStoreV1); restart both",
        good="start scripts of the installed release's documentation",
        threads=("https://github.com/vllm-project/vllm-ascend/pull/9822",),
    ),
    Problem(
        code="KVD026",
        name="ascend-metaserver-unreachable",
        severity=Severity.HANG,
        title="Decode cannot call the proxy's metaserver, so prefill is never asked (MooncakeLayerwiseConnector).",
        shows=(
            Logged("Failed to connect to metaserver: <url>, retry"),
            Logged("Access metaserver fail: <reason>"),
        ),
        cause="Layerwise P/D begins at decode: it posts its blocks to `metaserver` of kv_transfer_params, an address "
        "of the proxy, which then asks prefill. The proxy put there an address that decode cannot reach "
        "(`localhost`, 0.0.0.0), the url is None because another proxy is used, or an HTTP proxy stands between.",
        now="start vllm-ascend's load_balance_proxy_layerwise_server_example.py with --host <an address that decode "
        "reaches>; curl http://PROXY:PORT/healthcheck from decode; unset http_proxy; send requests to that proxy only",
        good="the layerwise proxy of the same vllm-ascend release, at a routed address",
    ),
    Problem(
        code="KVD027",
        name="ascend-layerwise-proxy-missing",
        severity=Severity.CRASH,
        title="A request reached MooncakeLayerwiseConnector without what its own proxy adds.",
        shows=(
            Failed(kind="KeyError", text="'remote_cached_tokens'"),
            Failed(kind="KeyError", within="mooncake_layerwise_connector.py:update_state_after_alloc"),
        ),
        cause="Prefill of MooncakeLayerwiseConnector is asked by the metaserver of the layerwise proxy, with "
        "decode's blocks and remote_cached_tokens in kv_transfer_params. This request came from the proxy of "
        "MooncakeConnectorV1 (load_balance_proxy_server_example.py), from a router, or straight from a client; or "
        "from the proxy of an older release. EngineCore dies of it.",
        now="the proxy load_balance_proxy_layerwise_server_example.py of this vllm-ascend release in place of the "
        "other; or MooncakeConnectorV1 on both sides with the proxy that runs; restart the engine",
        good="proxy and connector of one kind and one release",
        threads=(_ASCEND + "issues/14000",),
    ),
    Problem(
        code="KVD028",
        name="ascend-parallel-sizes-missing",
        severity=Severity.CRASH,
        title="vllm-ascend's Mooncake connector is not told, or is told wrongly, how prefill and decode are cut.",
        shows=(
            Failed(kind="AssertionError", source="in prefill_parallel_config"),
            Failed(kind="AssertionError", source="in decode_parallel_config"),
            Failed(kind="ValueError", text="prefill_tp_size: <prefill> must be greater than or equal to the decode_tp"),
            Failed(kind="AssertionError", text="decode pp size must be 1"),
            Failed(kind="AssertionError", text="pp and pcp cannot open in same time"),
            Failed(kind="AssertionError", text="Mamba group prefill TP_size must equal or larger than decode TP_size"),
            Failed(kind="AssertionError", text="Remote block size must be divisible by local block size"),
            Failed(kind="AssertionError", text="Context parallel does not support different P/D block size now"),
            Failed(kind="AssertionError", text="Prefill context parallel is not support on decoder nodes"),
        ),
        cause="Both engines need both sizes in kv_connector_extra_config, and the rules are: tensor parallel size of "
        "prefill at least that of decode, no pipeline parallelism on decode, none together with prefill context "
        "parallelism, block sizes that divide.",
        now='"kv_connector_extra_config": {"prefill": {"dp_size": 2, "tp_size": 8}, "decode": {"dp_size": 4, '
        '"tp_size": 4}} with the sizes that the engines run, the same text on both sides; restart',
        good="one such configuration for both sides",
    ),
    Problem(
        code="KVD029",
        name="ascend-rank-table-of-other-ids",
        severity=Severity.CRASH,
        title="The rank table does not name this process's NPU as the process sees it.",
        shows=(
            Failed(kind="AssertionError", text="Can't read the target server_id <server> and device_rank <rank>"),
            Failed(kind="TypeError", text="LLMDataDistCMgrAgentMetadata"),
            Logged("ranktable config devId[<table>], but local devId[<own>]"),
            Logged("HcclCommInitClusterInfo failed"),
        ),
        cause="The table (DISAGGREGATED_PREFILL_RANK_TABLE_PATH) is searched by server_id (the node's own address) "
        "and device_id among ASCEND_RT_VISIBLE_DEVICES, and HCCL then wants the physical device id. In a container "
        "with some of the cards the two numbers differ: cards 4 and 7 are 0 and 1 inside.",
        now="give the container all cards of the node and choose by ASCEND_RT_VISIBLE_DEVICES=4,7, so that the "
        "numbers agree; make the table anew on these nodes (gen_ranktable.sh); server_id = the address in "
        "HCCL_IF_IP; or MooncakeConnectorV1, which needs no table",
        good="vllm-ascend's MooncakeConnectorV1: LLMDataDist and its table are gone from later releases",
        threads=(_ASCEND + "issues/2618",),
    ),
    Problem(
        code="KVD030",
        name="ascend-engine-not-initialized",
        severity=Severity.CRASH,
        title="Mooncake's transfer engine does not start on this NPU.",
        shows=(
            Failed(kind="RuntimeError", text="TransferEngine initialization failed with ret_value: <code>"),
            Failed(kind="AssertionError", text="The address of the registered kv cache should be aligned to 2M"),
        ),
        sure=False,
        cause="The E lines of Mooncake before it have the reason: mostly a Mooncake without Ascend support (it must "
        "be built with USE_ASCEND_DIRECT), CANN older than it was built for, libraries not found "
        "(LD_LIBRARY_PATH=/usr/local/lib), or device IPs that are not set (hccn_tool -i 0 -ip -g).",
        now="the image of vllm-ascend, which has its Mooncake; export "
        "LD_LIBRARY_PATH=/usr/local/lib:$LD_LIBRARY_PATH; hccn_tool -i 0 -ip -g and -link -g for each NPU; restart. "
        "Not aligned: vllm-ascend with its own allocator, without PYTORCH_NPU_ALLOC_CONF of your own",
        good="vllm-ascend, CANN and Mooncake of one image",
    ),
    Problem(
        code="KVD005",
        name="mooncake-groups-of-peer-differ",
        severity=Severity.CRASH,
        title="Prefill names blocks of fewer KV groups than decode has, and decode dies of it.",
        shows=(
            Failed(kind="IndexError", within="mooncake_connector.py:start_load_kv"),
            Failed(kind="IndexError", within="mooncake_hybrid_connector.py:start_load_kv"),
            Failed(kind="IndexError", within="mooncake_hybrid_connector.py:_transfer_kv_cache_all_groups"),
            Failed(kind="IndexError", within="mooncake_connector.py:_transfer_kv_cache"),
        ),
        cause="What makes a KV group is set on one side only: a draft model or MTP (--speculative-config), the hybrid "
        "KV cache manager, --block-size, or another release. The group of the draft model is the last in the list.",
        now="the same --speculative-config, --block-size and --disable-hybrid-kv-cache-manager on prefill and decode "
        "(prefill may set num_speculative_tokens to 1); restart both",
        good="one configuration for both roles, with only kv_role, ports and parallel sizes apart",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/16177",),
    ),
)
