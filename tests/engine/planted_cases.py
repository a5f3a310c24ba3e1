"""The cases of planted_logs.py: what is planted, its cause and its remedy, written before kvfix read a log.

None of them is one of the shared whole logs. Ports below 1024 and folders of /proc are used where nothing may be
written or found.
"""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine
from tests.engine import fake_redis, start
from tests.engine.planted_logs import REQUESTS, Case, Engine, Run
from tests.verify import served

V1 = real_engine.in_process(64)
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
#: So that a case does not take five minutes.
QUICK = {"lmcache.mp.mq_timeout": 10}
MP = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": "$SERVER", **QUICK},
}


def v1(**settings: Any) -> dict[str, Any]:
    return real_engine.in_process(64, **settings)


def offloading(**extra: Any) -> dict[str, Any]:
    return {**OFFLOADING, "kv_connector_extra_config": extra}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def redis(fault: str = "") -> Callable[[Run], None]:
    """A store that has this fault from the start."""

    def before(run: Run) -> None:
        run.things["redis"] = server = run.enter(fake_redis.running(fault))
        run.values["REDIS"] = str(server.server_address[1])

    return before


#: Settings of a case whose chunks are in this store alone.
IN_REDIS = v1(remote_url="redis://127.0.0.1:$REDIS", local_cpu=False)


def busy(run: Run) -> None:
    """$BUSY is a port at which another process listens."""
    other = run.enter(closing(socket.socket()))
    port = real_engine.free_port()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("0.0.0.0", port))
    other.listen()
    run.values["BUSY"] = str(port)


def server(*options: str) -> Callable[[Run], None]:
    """An `lmcache server` with these options; $SERVER is its port."""

    def before(run: Run) -> None:
        run.logs["server"] = run.folder / "server.log"
        transfer = run.enter(start.server(log=run.logs["server"], options=options))
        run.values["SERVER"] = str(transfer["kv_connector_extra_config"]["lmcache.mp.port"])

    return before


def server_alone(*options: str) -> Callable[[Case, Run], None]:
    """Only an `lmcache server`, which does not start."""

    def main(case: Case, run: Run) -> None:
        words = [word.replace("$BUSY", run.values.get("BUSY", "")) for word in options]
        run.logs["engine"] = run.folder / "server.log"
        command = ["lmcache", "server", "--l1-size-gb", "0.5", "--eviction-policy", "LRU", *words]
        run.doctor(command, os.environ)
        log = run.logs["engine"]
        with suppress(RuntimeError), start.server(log=log, options=tuple(words)):
            pass

    return main


def fault_at_run_time(fault: str) -> Callable[[Run, Engine], None]:
    def play(run: Run, engine: Engine) -> None:
        run.things["redis"].fault = fault
        engine.twice()

    return play


def closes(run: Run, engine: Engine) -> None:
    engine.ask(*REQUESTS)
    run.things["redis"].fault = "closes"
    engine.twice()


def disk_deleted(run: Run, engine: Engine) -> None:
    engine.twice()
    shutil.rmtree(run.folder / "data" / "cache")
    engine.twice()


def rank_killed(run: Run, engine: Engine) -> None:
    engine.ask(*REQUESTS)
    os.kill(engine.process_named("Worker_TP1"), signal.SIGKILL)
    engine.ask(REQUESTS[0])


def core_killed(run: Run, engine: Engine) -> None:
    engine.ask(*REQUESTS)
    os.kill(engine.process_named("EngineCore"), signal.SIGKILL)
    engine.ask(REQUESTS[0])


def core_paused(run: Run, engine: Engine) -> None:
    engine.ask(*REQUESTS)
    paused(engine.process_named("EngineCore"), 25, lambda: engine.ask(REQUESTS[0]))
    engine.twice()


def server_paused(run: Run, engine: Engine) -> None:
    engine.twice()
    paused(listening(int(run.values["SERVER"])), 60, engine.twice)


def paused(pid: int, seconds: float, do: Callable[[], Any]) -> None:
    os.kill(pid, signal.SIGSTOP)
    again = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    again.start()
    do()
    again.join()


def listening(port: int) -> int:
    from kvfix_tools.doctor import servers

    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "server" in words and str(port) in words and servers.running(port) is not None:
            return int(folder.name)
    raise LookupError(f"nothing listens at {port}")


def two_engines(second: dict[str, Any], *options: str) -> Callable[[Case, Run], None]:
    """Both use one store: the first one stores, the second one asks for the same prompts."""

    def main(case: Case, run: Run) -> None:
        for name, more in (("first", {}), ("engine", {"transfer": second, "options": options} if second else {})):
            with run.running(case, name, **more) as engine:
                if engine is not None:
                    engine.twice()

    return main


def nixl_pair(change: Callable[[dict[str, Any], Engine], Any]) -> Callable[[Case, Run], None]:
    """Prefill and decode; the requests go to both as a proxy sends them. change: what happens to kv_transfer_params
    and to prefill in between."""

    def main(case: Case, run: Run) -> None:
        asks = {"do_remote_decode": True, "do_remote_prefill": False}
        with (
            run.running(case, "prefill", transfer={**NIXL, "kv_role": "kv_producer"}) as prefill,
            run.running(case, transfer={**NIXL, "kv_role": "kv_consumer"}) as decode,
        ):
            for number, (tokens, count) in enumerate(REQUESTS):
                assert prefill is not None
                assert decode is not None
                (answer,) = prefill.ask((tokens, 1), kv_transfer_params=asks)
                params = (answer or {}).get("kv_transfer_params") or {}
                if number:
                    change(params, prefill)
                decode.ask((tokens, count), kv_transfer_params=params)

    return main


def wrong_port(params: dict[str, Any], prefill: Engine) -> None:
    params.update(remote_port=real_engine.free_port(), remote_engine_id="9d3c1f0a-0b6e-4a52-8f0e-1f6f0c4d7a11")


def prefill_killed(params: dict[str, Any], prefill: Engine) -> None:
    if prefill.process.poll() is None:
        prefill.kill()
    params.update(remote_request_id=params.get("remote_request_id"))


FS = v1(remote_url="fs://host:0$DATA/", local_cpu=False)
BROKEN_YAML = "chunk_size: 64\n  local_cpu: true\nmax_local_cpu_size: [1\n"
TYPED = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'

CASES = [
    # Healthy twins.
    Case("ok-v1", transfer=V1),
    Case("ok-file", transfer={**V1, "kv_connector_extra_config": {}},
         file="chunk_size: 64\nlocal_cpu: true\nmax_local_cpu_size: 0.2\npre_caching_hash_algorithm: sha256_cbor\n"),
    Case("ok-redis", transfer=IN_REDIS, before=redis()),
    Case("ok-disk", transfer=v1(local_disk="file://$DATA/cache/", max_local_disk_size=0.1, local_cpu=False)),
    Case("ok-ranks", transfer=V1, options=("--tensor-parallel-size", "2")),
    Case("ok-mp", transfer=MP, before=server()),
    Case("ok-offload", transfer=served.OFFLOADING),
    # The statistics of the stand-in, whose class has another name, end the API server (KVD1091).
    Case("ok-multi", transfer=multi(V1, served.OFFLOADING), options=("--disable-log-stats",)),
    Case("ok-store", transfer=FS, main=two_engines({})),
    Case("ok-nixl", transfer=NIXL, main=nixl_pair(lambda params, prefill: None)),
    # --kv-transfer-config.
    Case("json-quotes", "The shell took the quotes away: --kv-transfer-config is not JSON.",
         "put the JSON into single quotes", "ok-v1", "KVD744", transfer=TYPED.replace('"', "")),
    Case("connector-typo", "kv_connector names LMCacheConnector, which this vLLM does not have.",
         "kv_connector: LMCacheConnectorV1", "ok-v1", "KVD742", transfer={**V1, "kv_connector": "LMCacheConnector"}),
    Case("field-unknown", "--kv-transfer-config has a field kv_extra_config, which vLLM does not know.",
         "kv_connector_extra_config", "ok-v1",
         "KVD744", transfer={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both",
                                                          "kv_extra_config": {"lmcache.chunk_size": 64}}),
    Case("class-missing", "The module in kv_connector_module_path has no class LMCacheConnectorV1Dyn.",
         "kv_connector: LMCacheConnectorV1Dynamic", "ok-v1", "KVD743",
         transfer={**V1, "kv_connector": "LMCacheConnectorV1Dyn",
                   "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1"}),
    Case("policy-typo", "kv_load_failure_policy has the value recompue, which is none of fail and recompute.",
         "kv_load_failure_policy: recompute (or fail)", "ok-v1",
         "KVD744", transfer={**V1, "kv_load_failure_policy": "recompue"}),
    Case("mooncake-missing", "MooncakeConnector is asked for, and the package of Mooncake is not installed.",
         "pip install mooncake-transfer-engine, or another connector", "ok-v1", "KVD509",
         transfer={"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}),
    Case("hybrid-manager", "The hybrid KV cache manager is switched on, and LMCacheConnectorV1 does not support it.",
         "take --no-disable-hybrid-kv-cache-manager out", "ok-v1", "KVD651", transfer=V1,
         options=("--no-disable-hybrid-kv-cache-manager",)),
    # Settings of LMCache in process.
    Case("chunk-text", "chunk_size has the value 64k, which is no whole number.",
         "lmcache.chunk_size: 64 (a whole number of tokens)", "ok-v1", "KVD1892", transfer=v1(chunk_size="64k")),
    Case("file-missing", "LMCACHE_CONFIG_FILE names a file that does not exist.",
         "correct LMCACHE_CONFIG_FILE or mount the file", "ok-file",
         "KVD1108", transfer={**V1, "kv_connector_extra_config": {}},
         environment={"LMCACHE_CONFIG_FILE": "$DATA/lmcache.yaml"}),
    Case("file-broken", "The file in LMCACHE_CONFIG_FILE is not valid YAML.",
         "correct the YAML at the line that the error names", "ok-file", "KVD1903",
         transfer={**V1, "kv_connector_extra_config": {}}, file=BROKEN_YAML),
    Case("file-ini", "The file in LMCACHE_CONFIG_FILE has KEY=VALUE lines and no YAML mapping.",
         "write KEY: VALUE", "ok-file", "KVD1903", transfer={**V1, "kv_connector_extra_config": {}},
         file="chunk_size=64\nlocal_cpu=true\n"),
    Case("extra-json", "LMCACHE_EXTRA_CONFIG is not valid JSON.", "LMCACHE_EXTRA_CONFIG='{\"KEY\": VALUE}'", "ok-v1",
         "KVD1892", transfer=V1, environment={"LMCACHE_EXTRA_CONFIG": "{save_chunk_meta: false"}),
    Case("setting-typo", "max_local_cpu_sise is no setting of LMCache: the default size counts.",
         # LMCache warns in the same words of a right setting that only its adapter reads (max_tokens_per_load).
         "lmcache.max_local_cpu_size", "ok-v1", transfer=v1(max_local_cpu_sise=1)),
    Case("no-prefix", "chunk_size in kv_connector_extra_config lacks the prefix lmcache. and is not read.",
         '"lmcache.chunk_size": 64', "ok-v1",
         transfer={**V1, "kv_connector_extra_config": {"chunk_size": 64, "max_local_cpu_size": 0.2}}),
    Case("cpu-zero", "max_local_cpu_size is 0: LMCache has no memory for chunks.", "max_local_cpu_size: 1 or more",
         "ok-v1", "KVD1900", transfer=v1(max_local_cpu_size=0)),
    Case("cpu-huge", "max_local_cpu_size is 4000 GiB, more than the machine has.",
         "a max_local_cpu_size below the free memory", "ok-v1", "KVD1905", transfer=v1(max_local_cpu_size=4000)),
    Case("policy-unknown", "cache_policy has the value FIFOO, which LMCache does not have.",
         "cache_policy: FIFO (or LRU, LFU, MRU)", "ok-v1", "KVD1901", transfer=v1(cache_policy="FIFOO")),
    Case("hash-unknown", "pre_caching_hash_algorithm has the value md5, which is no algorithm of vLLM.",
         "pre_caching_hash_algorithm: sha256_cbor", "ok-v1", transfer=v1(pre_caching_hash_algorithm="md5")),
    Case("serde-unknown", "remote_serde has the value zip, which LMCache does not have.",
         "remote_serde: naive (or cachegen)", "ok-redis", "KVD1901", before=redis(),
         transfer=v1(remote_url="redis://127.0.0.1:$REDIS", remote_serde="zip")),
    Case("p2p-alone", "enable_p2p is set without a controller and its ports.",
         "enable_controller: true with the controller's URLs, or enable_p2p: false", "ok-v1", "KVD749",
         transfer=v1(enable_p2p=True)),
    Case("pd-no-role", "enable_pd is set without pd_role.", "pd_role: sender (or receiver)", "ok-v1", "KVD751",
         transfer=v1(enable_pd=True)),
    Case("blending", "enable_blending is set: vLLM lacks the hook that CacheBlend needs.", "enable_blending: false",
         "ok-v1", "KVD746", transfer=v1(enable_blending=True)),
    # Stores of LMCache in process.
    Case("remote-no-port", "remote_url has no port.", "remote_url: redis://HOST:6379", "ok-redis", "KVD1042",
         transfer=v1(remote_url="redis://127.0.0.1")),
    Case("remote-no-host", "remote_url has no host.", "remote_url: redis://HOST:6379", "ok-redis", "KVD1042",
         transfer=v1(remote_url="redis://:6379")),
    Case("redis-nobody", "Nothing listens at the port of remote_url.", "start Redis or correct remote_url", "ok-redis",
         "KVD1042", transfer=v1(remote_url="redis://127.0.0.1:$FREE", local_cpu=False)),
    Case("mooncake-store", "remote_url names mooncakestore://, and the package of Mooncake is not installed.",
         "pip install mooncake-transfer-engine", "ok-redis", "KVD890",
         transfer=v1(remote_url="mooncakestore://127.0.0.1:$FREE/")),
    Case("disk-is-file", "local_disk names a file and not a folder.", "a folder for local_disk", "ok-disk", "KVD1899",
         before=lambda run: (run.folder / "data" / "cache").write_text(""),  # type: ignore[arg-type,return-value]
         transfer=v1(local_disk="file://$DATA/cache/", max_local_disk_size=0.1)),
    Case("disk-read-only", "local_disk lies on a file system where no folder can be made.",
         "local_disk on a volume that vLLM's user may write", "ok-disk", "KVD974",
         transfer=v1(local_disk="file:///sys/lmcache/", max_local_disk_size=0.1)),
    Case("redis-oom", "Redis has reached maxmemory and refuses writes (OOM).",
         "maxmemory-policy allkeys-lru, or a larger maxmemory", "ok-redis", "KVD873", setup=False, before=redis("oom"),
         transfer=IN_REDIS),
    Case("redis-loading", "Redis still loads its data set and refuses commands (LOADING).",
         "wait until it has loaded; then vLLM finds it", "ok-redis", "KVD1895", before=redis("loading"),
         transfer=IN_REDIS),
    Case("redis-replica", "remote_url names a read-only replica of Redis (READONLY).",
         "the address of the primary in remote_url", "ok-redis", "KVD1896", before=redis("readonly"),
         transfer=IN_REDIS),
    Case("redis-misconf", "Redis cannot write its snapshot and refuses writes (MISCONF).",
         "free its disk, or stop-writes-on-bgsave-error no", "ok-redis", "KVD874", setup=False, before=redis("misconf"),
         transfer=IN_REDIS),
    Case("redis-noperm", "The user of Redis may not write (NOPERM).", "give the user +set in the ACL", "ok-redis",
         "KVD1897", setup=False, before=redis("noperm"), transfer=IN_REDIS),
    Case("redis-silent", "Redis accepts connections and answers nothing any more.", "restart Redis", "ok-redis",
         "KVD862", setup=False, before=redis(), play=fault_at_run_time("silent"), transfer=IN_REDIS),
    Case("redis-closes", "Redis breaks off its answers in the middle of a value.",
         "look at Redis: client-output-buffer-limit, restarts, a proxy", "ok-redis",
         "KVD224", setup=False, before=redis(), play=closes, transfer=IN_REDIS),
    Case("disk-deleted", "The folder of local_disk was deleted while the engine runs.",
         "make the folder again and restart; nobody else may clean it", "ok-disk",
         "KVD815", setup=False, play=disk_deleted,
         transfer=v1(local_disk="file://$DATA/cache/", max_local_disk_size=0.1, local_cpu=False)),
    Case("chunk-differs", "Two engines on one store have different chunk sizes: neither finds the other's chunks.",
         "the same chunk_size on both", "ok-store", transfer=FS,
         main=two_engines({**FS, "kv_connector_extra_config": {**FS["kv_connector_extra_config"],
                                                               "lmcache.chunk_size": 128}})),
    Case("dtype-differs", "Two engines on one store have different dtypes: neither finds the other's chunks.",
         "the same --dtype on both", "ok-store", transfer=FS, main=two_engines(FS, "--dtype", "bfloat16")),
    # Processes.
    Case("rank-killed", "One of two workers was killed from outside (SIGKILL).",
         "dmesg, kubectl describe pod: the OOM killer", "ok-ranks", "KVD853", setup=False, transfer=V1,
         options=("--tensor-parallel-size", "2"), play=rank_killed),
    Case("core-killed", "EngineCore was killed from outside (SIGKILL).", "dmesg, kubectl describe pod: the OOM killer",
         "ok-v1", "KVD1906", setup=False, transfer=V1, play=core_killed),
    Case("ok-core-paused", transfer=V1, play=core_paused),
    Case("api-port", "Another process listens at the port of the API server.", "another --port, or end that process",
         "ok-v1", "KVD220", transfer=V1, before=busy, environment={"PORT": "$BUSY"}),
    # LMCache's server.
    Case("mp-nobody", "No LMCache server listens at the port.", "lmcache server --port PORT, before vLLM", "ok-mp",
         "KVD116", transfer=json.loads(json.dumps(MP).replace("$SERVER", "$FREE"))),
    Case("mp-chunk", "The server's chunk size of 48 is no multiple of vLLM's block size of 32.",
         "lmcache server --chunk-size 64 (a multiple of --block-size)", "ok-mp", "KVD908", transfer=MP,
         before=server("--chunk-size", "48")),
    Case("mp-mode", "The server was started with the transfer mode lmcache_driven, which a CPU worker does not have.",
         "lmcache server --supported-transfer-mode auto", "ok-mp", "KVD206", transfer=MP,
         before=server("--supported-transfer-mode", "lmcache_driven")),
    Case("mp-paused", "The LMCache server stood still for a minute (SIGSTOP) while requests came.",
         "look why it stood still; the engine finds it again", "ok-mp", "KVD204", setup=False, transfer=MP,
         before=server(), play=server_paused),
    Case("mp-l1-small", "The L1 of the server is smaller than one prompt: nothing is stored.",
         "a larger --l1-size-gb", "ok-mp", transfer=MP, before=server("--l1-size-gb", "0.0002")),
    Case("server-port", "Another process listens at the port of the LMCache server.",
         "another --port, or end that process", "ok-mp", "KVD917", before=busy, main=server_alone("--port", "$BUSY")),
    Case("server-l2-folder", "The server's L2 adapter names a folder that cannot be made.",
         "base_path on a volume that the server may write", "ok-mp", "KVD974",
         main=server_alone("--l2-adapter", '{"type": "fs", "base_path": "/sys/lmcache"}')),
    Case("server-l2-type", "The server's L2 adapter has the type fss, which LMCache does not have.",
         '--l2-adapter \'{"type": "fs", ...}\'', "ok-mp", "KVD933",
         main=server_alone("--l2-adapter", '{"type": "fss", "base_path": "/tmp/l2"}')),
    # vLLM's own connectors.
    Case("offload-zero", "cpu_bytes_to_use is 0.", "cpu_bytes_to_use: 10737418240", "ok-offload", "KVD611",
         transfer=offloading(cpu_bytes_to_use=0)),
    Case("offload-text", "cpu_bytes_to_use has the value 10GB, which is no number of bytes.",
         "cpu_bytes_to_use: 10737418240", "ok-offload", "KVD611", transfer=offloading(cpu_bytes_to_use="10GB")),
    Case("offload-huge", "cpu_bytes_to_use is 8 TiB, more than the machine has.",
         "a cpu_bytes_to_use below the free memory", "ok-offload", "KVD625",
         transfer={**served.OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 40}}),
    Case("offload-block", "block_size of OffloadingConnector is no multiple of vLLM's block size.",
         "block_size: a multiple of 32", "ok-offload", "KVD610",
         transfer=offloading(cpu_bytes_to_use=1 << 28, block_size=50)),
    Case("offload-spec", "spec_name has the value CPUOffloadSpec, which vLLM does not have.",
         "spec_name: CPUOffloadingSpec", "ok-offload", "KVD613",
         transfer=offloading(cpu_bytes_to_use=1 << 28, spec_name="CPUOffloadSpec")),
    Case("multi-unknown", "A child of MultiConnector is OffloadConnector, which vLLM does not have.",
         "OffloadingConnector", "ok-multi", "KVD742",
         transfer=multi(V1, {**OFFLOADING, "kv_connector": "OffloadConnector"})),
    Case("multi-empty", "MultiConnector has no list of connectors.",
         '"kv_connector_extra_config": {"connectors": [...]}', "ok-multi", "KVD744",
         transfer={"kv_connector": "MultiConnector", "kv_role": "kv_both"}),
    Case("multi-no-role", "A child of MultiConnector has no kv_role.", '"kv_role": "kv_both" in the child',
         "ok-multi", "KVD744",
         transfer=multi(V1, {"kv_connector": "OffloadingConnector",
                             "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28}})),
    Case("nixl-port", "Another process listens at the port of NIXL's side channel.",
         "another VLLM_NIXL_SIDE_CHANNEL_PORT", "ok-nixl", "KVD561", transfer=NIXL, before=busy,
         environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "$BUSY"}),
    Case("nixl-backend", "backends names UCXX, a plugin that NIXL does not have.", '"backends": ["UCX"]', "ok-nixl",
         "KVD560", transfer={**NIXL, "kv_connector_extra_config": {"backends": ["UCXX"]}}),
    Case("nixl-wrong-port", "kv_transfer_params name a port at which no prefill instance listens.",
         "the proxy must hand on prefill's kv_transfer_params (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT)", "ok-nixl",
         "KVD550", setup=False, transfer=NIXL, main=nixl_pair(wrong_port)),
    Case("nixl-prefill-killed", "The prefill instance was killed before decode read its KV.",
         "restart prefill, look why it was killed", "ok-nixl", "KVD591", setup=False, transfer=NIXL,
         main=nixl_pair(prefill_killed)),
]  # fmt: skip
