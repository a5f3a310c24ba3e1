"""The Mooncake store's clients and its master: what keeps them from starting, or from each other."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem, either

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake"
_MOONCAKE_ISSUES = "https://github.com/kvcache-ai/Mooncake/issues/"

PROBLEMS = (
    Problem(
        code="KVD898",
        name="mooncake-segment-not-mounted",
        severity=Severity.CRASH,
        title="A worker could not mount its memory at the Mooncake master.",
        shows=(
            Logged("Failed to mount segment"),
            Logged("mount_segment_to_master_failed"),
            Logged("Failed to mount segment due to rpc error"),
            Logged("Initialize mooncake failed."),
        ),
        cause="The master did not answer in time: it is not there (master_server_address), a proxy stands between, or "
        "the segment is so large that registering it takes longer than the call. With `End of file` before it the "
        "master took the call and closed it: it is of another release of Mooncake, or died of it (its log).",
        now="start mooncake_master first, check master_server_address from the worker's container, unset http_proxy, a "
        "smaller global_segment_size; one release of mooncake-transfer-engine on master and workers; then restart",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
        threads=(_MOONCAKE_ISSUES + "1050", _MOONCAKE_ISSUES + "180"),
    ),
    Problem(
        code="KVD371",
        name="mooncake-client-cannot-be-made",
        severity=Severity.CRASH,
        title="Mooncake's client could not set itself up on any port.",
        shows=(
            Logged("Failed to create client after <count> retries"),
            Logged("Failed to create client on port <port>, retry"),
        ),
        sure=False,
        replaces=("KVD898",),  # the segment's turn does not come
        cause="Each try takes another port, so it is not the port: the transfer engine did not start, or the memory "
        "of the segment could not be registered (protocol, device_name, fabric memory or huge pages of an Ascend "
        "card, ulimit -l), or the master refused. The E line before the first retry decides.",
        now="grep -m3 '^E[0-9]' on this worker's log; protocol and device_name as the node has them (tcp for a try), "
        "a small global_segment_size; on Ascend: ASCEND_ENABLE_USE_FABRIC_MEM=1 only where the driver has it",
        good="the setting that the first E line names",
        threads=("https://github.com/vllm-project/vllm-ascend/issues/9841",),
    ),
    Problem(
        code="KVD389",
        name="mooncake-without-that-metadata",
        severity=Severity.CRASH,
        title="Mooncake was built without the kind of metadata server that metadata_server names.",
        shows=(Logged("Unable to find metadata storage plugin <kind>"),),
        sentence="no {kind}",
        cause="Mooncake's wheels know http and P2PHANDSHAKE; etcd and redis are there only if it was built with "
        "USE_ETCD or USE_REDIS. Mooncake ends the process (glog's FATAL) with it.",
        now='metadata_server "P2PHANDSHAKE" in every configuration (or http://HOST:8080/metadata of `mooncake_master '
        "--enable_http_metadata_server=true`), restart all",
        good="keep it so, or Mooncake from source with cmake -DUSE_ETCD=ON (-DUSE_REDIS=ON)",
        threads=("https://github.com/kvcache-ai/Mooncake/issues/386",),
    ),
    Problem(
        code="KVD390",
        name="mooncake-card-without-gid",
        severity=Severity.CRASH,
        title="Mooncake cannot open a network card for RDMA: the GID that it takes is not usable.",
        shows=(
            Logged("Failed to query GID <number> on <card>: "),
            Logged("Failed to open device <card> on port"),
        ),
        sentence="card {card}",
        sure=False,
        cause="A W line just before tells: `User-specified GID index`: MC_GID_INDEX names an entry that this card has "
        "not, or that has no network device. `Failed to query GID`: the card's port is down, or the container does "
        "not see its network device (no host network). If no card is left, `No available RNIC` ends the set-up.",
        now="show_gids (or ls /sys/class/infiniband/CARD/ports/1/gids) in this container: unset MC_GID_INDEX, or give "
        'it the index of a RoCE v2 entry with an address; device_name with cards whose port is ACTIVE; "protocol": '
        '"tcp" with device_name "" needs none',
        good="--network host (hostNetwork: true) or an RDMA device plugin, and device_name set",
        threads=(
            "https://github.com/kvcache-ai/Mooncake/issues/1384",
            "https://github.com/kvcache-ai/Mooncake/issues/879",
        ),
    ),
    Problem(
        code="KVD470",
        name="mooncake-name-taken",
        severity=Severity.CRASH,
        title="Two Mooncake clients want the same name at the metadata server.",
        shows=(
            *either("Duplicate rpc_meta key not allowed"),
            Logged("Failed to re-publish RPC meta entry for <name>"),
        ),
        cause="The key is mooncake/rpc_meta/<local_hostname>. Two workers with the same local_hostname (with a port in "
        "it) use it at once, or one that was killed has left its entry: the http metadata server refuses to overwrite. "
        "With `Re-publishing RPC meta entry` it is the client's own, written again: mooncake_master refuses it before "
        "Mooncake's pull 2311 (June 2026), mooncake_http_metadata_server still; what is there stays, and is right.",
        now="local_hostname without a port and with the node's own address (each worker then takes a free port), or "
        "another port for each worker; after a kill restart the metadata server (or mooncake_master)",
        good='"metadata_server": "P2PHANDSHAKE", which keeps no entries',
        threads=(_MOONCAKE_ISSUES + "863", _MOONCAKE_ISSUES + "2296"),
    ),
    Problem(
        code="KVD196",
        name="mooncake-client-expired",
        severity=Severity.SLOW,
        title="The Mooncake master dropped a worker, and with it all that is stored in that worker's memory.",
        shows=(
            Logged("client_id=<client>, action=client_expired"),
            Logged("action=unmount_expired_segment"),
            Logged("OffloadObjectHeartbeat failed, error code is SEGMENT_NOT_FOUND"),
        ),
        said=(r"(?i)mooncake", r"client_expired|(?i:clients?\b[^\n.]{0,40}\bexpired)"),
        sure=False,
        cause="No ping in client_ttl (10 s). Normal after a worker ended. Else: a master with --enable-ha, and clients "
        "without etcd:// in their master address, which older clients (2025) need to ping at all (`Ping=0/0` in the "
        "master's metrics); or a late ping: cores bound or taken, a large segment registered, a slow SSD read, a busy "
        "master. real_client.cpp: an engine (dummy client) of a `mooncake_client`, where 10 s are fixed.",
        now='HA: "master_server_address": "etcd://HOST:2379" for every worker (lmcache: in extra_config), or the '
        "master without --enable-ha; late pings: mooncake_master --client_ttl=120; real_client.cpp: the store in the "
        "engine itself, without `mooncake_client`; then restart master and workers together",
        good="Mooncake 0.3.12 or newer, whose clients register again by themselves, and a client_ttl above the longest "
        "pause",
        threads=(
            _MOONCAKE_ISSUES + "1753",
            _MOONCAKE_ISSUES + "904",
            _MOONCAKE_ISSUES + "905",
            _MOONCAKE_ISSUES + "755",
            _MOONCAKE_ISSUES + "2621",
            _MOONCAKE_ISSUES + "1711",
            _MOONCAKE_ISSUES + "2198",
        ),
    ),
    Problem(
        code="KVD500",
        name="mooncake-master-lost-its-lease",
        severity=Severity.HANG,
        title="A Mooncake master lost its lease at etcd, and stops to be the leader.",
        shows=(
            Logged("error=keep alive channel closed"),
            Logged("Failed to cancel keep lease: no keep alive context found for the given lease ID"),
            Logged("Master service stopped: <code>"),
        ),
        sure=False,
        cause="etcd did not renew it in time: its leader hangs or was stopped (kill -19 leaves the connections open, "
        "so nobody notices), etcd's disk is slow, or the master stood still. The master then stands for election "
        "again; until one is elected workers find no master, and what the old one knew is gone.",
        now="etcdctl endpoint status --cluster -w table: every member answers, one leader; end a member that hangs "
        "(kill -9); etcdctl get mooncake-store/ --prefix names the new master; then restart workers that do not find "
        "it",
        good="three etcd members on disks of their own, and a supervisor that restarts mooncake_master",
        threads=(_MOONCAKE_ISSUES + "2253",),
    ),
    Problem(
        code="KVD1085",
        name="mooncake-object-larger-than-a-slice",
        severity=Severity.CRASH,
        title="Mooncake's client dies when it reads an object of more than 16 MB back from its SSD.",
        shows=(Died("Assertion `sizes[i] <= kMaxSliceSize' failed"), Died("sizes[i] <= kMaxSliceSize")),
        cause="An assertion about slices in memory stood in the way from SSD too, where it has no meaning. It is gone "
        "since pull request 2165 (May 2026). Everything that asks that client then sees `RPC_FAIL`.",
        now="smaller objects: a smaller chunk_size (LMCache) or page size (SGLang), or mooncake_master without "
        "--enable-offload; restart the client",
        good="mooncake-transfer-engine of after May 2026, with pull request 2165",
        threads=(
            "https://github.com/kvcache-ai/Mooncake/issues/2156",
            "https://github.com/kvcache-ai/Mooncake/pull/2165",
        ),
    ),
    Problem(
        code="KVD1528",
        name="mooncake-store-loads-with-the-step",
        severity=Severity.CRASH,
        title="`load_async` is off, and MooncakeStoreConnector loads in no other way.",
        shows=(
            Failed(
                kind="AssertionError",
                text="load_async must be True for better performance.",
                at=f"{_V1}/store/worker.py",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="kv_connector_extra_config has `load_async` false. The setting is read, and the worker then asserts "
        "that it is true when it is to load.",
        now='take `load_async` out of kv_connector_extra_config, or `"load_async": true`; restart',
        good="the setting",
    ),
    Problem(
        code="KVD1530",
        name="mooncake-bootstrap-address-incomplete",
        severity=Severity.CRASH,
        title="`bootstrap_server_address` of MooncakeConnector is no address with a port.",
        shows=(
            Failed(
                kind="ValueError",
                text="bootstrap_server_address must specify a host and port",
                at=f"{_V1}/mooncake_connector.py",
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="It wants HOST:PORT with a port from 1 to 65535, without http:// before it; IPv6 in brackets.",
        now='"kv_connector_extra_config": {"bootstrap_server_address": "10.0.0.5:8998"} on prefill; restart. Without '
        "it, VLLM_MOONCAKE_BOOTSTRAP_PORT and the node's own address are taken",
        good="the address",
    ),
    Problem(
        code="KVD1532",
        name="mooncake-store-not-emptied",
        severity=Severity.WRONG,
        title="The Mooncake store was to be emptied (new weights), and was not: it still serves KV of before.",
        shows=(
            Logged("Mooncake remove_all failed: <error>", at=f"{_V1}/store/worker.py"),
            Logged("Mooncake reset_store RPC failed: <error>", at=f"{_V1}/store/scheduler.py"),
        ),
        sentence="{error}",
        releases={"vllm": ">=0.26"},
        cause="The reset waits for the worker, which drains its stores and calls remove_all of the master. The master "
        "did not answer or refused, or the worker did not answer in time (the second line). Keys do not change with "
        "the weights, so what is left is a hit for the next request.",
        now="leave the engine paused and repeat: `curl -X POST 'http://ENGINE/reset_prefix_cache?reset_external=true'` "
        "(VLLM_SERVER_DEV_MODE=1); if it fails again, restart mooncake_master, which forgets all, then the engines",
        good="a pause with mode=wait before the reset, and a master that answers",
    ),
    Problem(
        code="KVD1534",
        name="mooncake-store-thread-failed",
        severity=Severity.HANG,
        title="A thread of MooncakeStoreConnector gave up a request, and does not report it.",
        shows=(Logged("Error in <thread> (req=<request>)", at=f"{_V1}/store/worker.py"),),
        sentence="request {request}, in {thread}",
        announces=True,
        releases={"vllm": ">=0.26"},
        cause="The traceback below it decides. In KVCacheStoreRecvingThread only errors of the store itself are "
        "handed on as failed loads: after one that comes before the store is asked, the request waits for its KV for "
        "ever. In KVCacheStoreSendingThread its KV is not stored, and no more.",
        now="restart the engine if requests stay in `Waiting:`; without MooncakeStoreConnector until the exception's "
        "cause is found",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`",
        threads=("https://github.com/vllm-project/vllm/pull/42788",),
        sure=False,
    ),
    Problem(
        code="KVD1572",
        name="mooncake-preferred-segment-empty",
        severity=Severity.CRASH,
        title="`preferred_segment` of MooncakeStoreConnector is set, and is no name.",
        shows=(
            Failed(
                kind="ValueError",
                text="Mooncake preferred_segment override must be a non-empty string",
                at=f"{_V1}/rdma_utils.py",
            ),
        ),
        releases={"vllm": ">=0.26"},
        cause="An empty string (a variable that the shell or the chart did not fill) or a number stands there.",
        now='take it out of kv_connector_extra_config, or `"preferred_segment": "HOST:PORT"` as the master lists the '
        "segment; restart",
        good="the configuration",
    ),
    Problem(
        code="KVD1255",
        name="mooncake-field-missing",
        severity=Severity.CRASH,
        title="Mooncake's store does not take its configuration: a field is missing, or it is another release.",
        shows=(
            Logged("An error occurred while loading the configuration: setup(): incompatible function arguments"),
            Logged("Configuration loading failed: setup(): incompatible function arguments"),
        ),
        sentence="a value that setup() was given is of a wrong kind",
        sure=False,
        cause="`Invoked with`, a line below, has the values in this order: local_hostname, metadata_server, "
        "global_segment_size, local_buffer_size, protocol, device_name, master_server_address. A None is a field that "
        "is not in the file of MOONCAKE_CONFIG_PATH; a size in quotes is one too. Without either the installed "
        "Mooncake has another setup() than the code that calls it.",
        now='each field that is None there into that file, as "local_hostname": "IP OF THIS NODE", '
        '"master_server_address": "IP OF THE MASTER:50051"; of another release: pip install -U '
        "mooncake-transfer-engine; restart",
        good="the configuration",
        threads=(_MOONCAKE_ISSUES + "476",),
    ),
)
