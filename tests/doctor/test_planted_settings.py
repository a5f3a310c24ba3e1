"""Faults planted in settings and set-ups: each is found by its check, with the remedy as typed, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.sites import MP, V1, Planted, look, problems, serve, site
from tests.doctor.test_planted_setups import PLANTED as IN_SETUPS

OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
SERVER = ["lmcache", "server", "--l1-size-gb", "1", "--eviction-policy", "LRU"]
MIN_RETRIEVE = serve(V1, extra={"lmcache.min_retrieve_tokens": 512})
PLANTED = {
    "unknown key in YAML": Planted("setting-names", serve(V1), "no setting 'chunk_sise'", "chunk_size: 256",
        yaml="chunk_sise: 256"),
    "unknown variable": Planted("setting-names", serve(V1), "reads no variable LMCACHE_MAX_LOCAL_CPU",
        "LMCACHE_MAX_LOCAL_CPU_SIZE", environment={"LMCACHE_MAX_LOCAL_CPU": "5"}),
    "an alias that is dropped": Planted("setting-names", serve(V1), "ignores it", "enable_pd: True",
        yaml="enable_xpyd: true"),
    "unknown key of the connector": Planted("connector-keys", serve(V1, extra={"lmcache.chunk_sise": 64}),
        "no key 'lmcache.chunk_sise'", '"lmcache.chunk_size"'),
    "the server's key in process": Planted("connector-keys", serve(V1, extra={"lmcache.mp.host": "h"}),
        "'lmcache.mp.host'", "only LMCacheMPConnector has it"),
    "a key without its prefix": Planted("connector-keys", serve(MP, extra={"mq_timeout": 5}),
        "does not read 'mq_timeout'", '"lmcache.mp.mq_timeout"'),
    "a port that is text": Planted("connector-keys", serve(MP, extra={"lmcache.mp.port": "a"}),
        "lmcache.mp.port is 'a'", "5555"),
    "wrong type in YAML": Planted("setting-values", serve(V1), "chunk_size is many", "256", yaml="chunk_size: many"),
    "a switch that is silently off": Planted("setting-values", serve(V1), "true or false", "True",
        environment={"LMCACHE_LOCAL_CPU": "yes"}),
    "out of range": Planted("setting-values", serve(V1), "out of range", "0 or more", yaml="max_local_cpu_size: -1"),
    "a ratio above one": Planted("setting-values", serve(V1), "out of range", "0 to 1",
        environment={"LMCACHE_LAZY_MEMORY_STEP_RATIO": "10"}),
    "a disk of no size": Planted("setting-values", serve(V1), "max_local_disk_size is 0", "max_local_disk_size: 100",
        yaml="local_disk: /tmp/x"),
    "a disk that cannot be written": Planted("local-disk", serve(V1), "cannot be written", "may write",
        yaml="local_disk: /proc/cpuinfo/x"),
    "a disk that is too small": Planted("local-disk", serve(V1), "all workers together need", "max_local_disk_size:",
        yaml="local_disk: /tmp/x\nmax_local_disk_size: 1.0e+9"),
    "a scheme that LMCache does not have": Planted("remote-scheme", serve(V1), "no connector for remote_url http://",
        "redis://", yaml="remote_url: http://h:1"),
    "a child without its size": Planted("offload-size",
        serve({"kv_connector": "MultiConnector", "kv_role": "kv_both"},
              extra={"connectors": [V1, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}]}),
        "has no cpu_bytes_to_use", '"cpu_bytes_to_use"'),
    "set twice": Planted("set-twice", serve(V1), "chunk_size is 256 in the file, LMCACHE_CHUNK_SIZE is 128",
        "in one place", environment={"LMCACHE_CHUNK_SIZE": "128"}, yaml="chunk_size: 256"),
    "deprecated": Planted("deprecated", serve(V1), "is deprecated", "runtime_plugin_locations",
        yaml="plugin_locations: [x]"),
    "settings that no connector reads": Planted("settings-read", serve(MP), "does not read LMCACHE_CHUNK_SIZE",
        "lmcache server --chunk-size", environment={"LMCACHE_CHUNK_SIZE": "128"}),
    "YAML that is a list": Planted("config-file", serve(V1), "not a mapping", "name: value", yaml="- chunk_size"),
    "JSON that is cut": Planted("kv-transfer-config", ["vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector"'],
        "is not JSON", "--kv-transfer-config '{"),
    "unknown field": Planted("kv-transfer-config", serve(V1, kv_rol="kv_both"), "has no key 'kv_rol'", '"kv_role"'),
    "a field in the wrong place": Planted("kv-transfer-config", serve(V1, **{"lmcache.chunk_size": 64}),
        "no key 'lmcache.chunk_size'", "kv_connector_extra_config"),
    "wrong role": Planted("kv-transfer-config", serve(V1, kv_role="producer"), "'producer' is not one of",
        '"kv_producer"'),
    "no role": Planted("kv-transfer-config", serve({"kv_connector": "LMCacheConnectorV1"}), "has no kv_role",
        "kv_both"),
    "wrong policy": Planted("kv-transfer-config", serve(V1, kv_load_failure_policy="retry"), "'retry'",
        "kv_load_failure_policy"),
    "no such connector": Planted("kv-transfer-config", serve(V1, kv_connector="LMCacheConnector"),
        "no connector 'LMCacheConnector'", "LMCacheConnectorV1"),
    "a policy that is none": Planted("setting-values", serve(V1), "cache_policy is FIFOO", "FIFO",
        yaml="cache_policy: FIFOO"),
    "a serializer that is none": Planted("setting-values", serve(V1, extra={"lmcache.remote_serde": "zip"}),
        "which LMCache does not have", "naive"),
    "a hash that is none": Planted("setting-values", serve(V1), "is md5", "sha256_cbor",
        yaml="pre_caching_hash_algorithm: md5"),
    "a mapping that is no JSON": Planted("setting-values", serve(V1), "must be a mapping", "the default is",
        environment={"LMCACHE_EXTRA_CONFIG": "{save_chunk_meta: false"}),
    "no memory": Planted("cpu-cache-size", serve(V1), "does not start without memory", "max_local_cpu_size: 5",
        yaml="max_local_cpu_size: 0"),
    "a store without a port": Planted("remote-store", serve(V1), "127.0.0.1:6379 does not answer", "start this store",
        yaml="remote_url: redis://127.0.0.1"),
    "a size that is text": Planted("offload-size", serve(OFFLOADING, extra={"cpu_bytes_to_use": "10GB"}),
        "which is no number of bytes", '"cpu_bytes_to_use"'),
    "a size of 0": Planted("offload-size", serve(OFFLOADING, extra={"cpu_bytes_to_use": 0}), "has no cpu_bytes_to_use",
        '"cpu_bytes_to_use"'),
    "a size beyond the memory": Planted("offload-size", serve(OFFLOADING, extra={"cpu_bytes_to_use": 1 << 50}),
        "cpu_bytes_to_use is 1.049e+06 GiB", "a smaller cpu_bytes_to_use"),
    "a spec that is none": Planted("offload-size",
        serve(OFFLOADING, extra={"cpu_bytes_to_use": 1 << 20, "spec_name": "CPUOffloadSpec"}),
        "no spec_name 'CPUOffloadSpec'", "CPUOffloadingSpec"),
    "chunks of no whole blocks": Planted("offload-size",
        serve(OFFLOADING, "--block-size", "32", extra={"cpu_bytes_to_use": 1 << 20, "block_size": 50}),
        "no multiple of vLLM's block size 32", '"block_size": 64'),
    "an L2 of no type": Planted("l2-adapter", [*SERVER, "--l2-adapter", '{"type": "fss"}'], "no type 'fss'", "fs"),
    "an L2 that cannot be written": Planted("l2-adapter",
        [*SERVER, "--l2-adapter", '{"type": "fs", "base_path": "/proc/lmcache"}'], "cannot be written", "may write"),
    "an L2 that is no JSON": Planted("l2-adapter", [*SERVER, "--l2-adapter", "fs"], "is not JSON", "base_path"),
    "P2P alone": Planted("peer-to-peer", serve(V1), "needs enable_controller", "enable_controller: true",
        yaml="enable_p2p: true"),
    "no such module": Planted("kv-transfer-config", serve(V1, kv_connector_module_path="lmcache.none"),
        "no module lmcache.none", "kv_connector_module_path"),
    "a child without a role": Planted("kv-transfer-config",
        serve({"kv_connector": "MultiConnector", "kv_role": "kv_both"},
              extra={"connectors": [{"kv_connector": "LMCacheConnectorV1"}]}),
        "LMCacheConnectorV1 has no kv_role", "kv_both"),
    "an option of another release": Planted("server-options",
        ["lmcache", "server", "--l1-size-gb", "1", "--eviction-policy", "LRU", "--transfer-mode", "gpu"],
        "has no option --transfer-mode", "--supported-transfer-mode"),
    "a setting of a later release": Planted("connector-keys", MIN_RETRIEVE, "no key 'lmcache.min_retrieve_tokens'", "",
        lmcache="0.3.10"),
    "a setting of this release": Planted("connector-keys", MIN_RETRIEVE, "", "", lmcache="0.3.14"),
    "variables of Kubernetes": Planted("setting-names", serve(V1), "", "",
        environment={"LMCACHE_SERVER_SERVICE_HOST": "10.0.0.1", "LMCACHE_SERVER_PORT": "tcp://10.0.0.1:5555",
                     "LMCACHE_SERVER_PORT_5555_TCP": "tcp://10.0.0.1:5555"}),
    "a choice that is none": Planted("server-options",
        ["lmcache", "server", "--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "gpu"],
        "is 'gpu'", "auto"),
}  # fmt: skip


#: Those of test_planted_setups.py too.
EVERY = {**PLANTED, **IN_SETUPS}


@pytest.mark.parametrize("name", EVERY)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, newest: Path) -> None:
    planted = EVERY[name]
    found = problems(planted.setup(tmp_path, newest), planted.check)
    assert any(planted.what in line.what and planted.do in line.do for line in found) == bool(planted.what), found


@pytest.mark.parametrize("check", sorted({each.check for each in EVERY.values()}))
def test_without_a_fault_there_is_none(check: str, newest: Path) -> None:
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOCAL_CPU": "True"}
    extra = {"lmcache.chunk_size": 64, "lmcache.max_local_cpu_size": 0.2, "use_layerwise": True}
    assert problems(look(serve(V1, "-tp", "2", extra=extra), newest, environment=environment), check) == []


def test_a_value_is_the_same_in_any_spelling(tmp_path: Path, newest: Path) -> None:
    (tmp_path / "lmcache.yaml").write_text("local_cpu: true\nmax_local_cpu_size: 5\n")
    environment = {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"), "LMCACHE_LOCAL_CPU": "True",
                   "LMCACHE_MAX_LOCAL_CPU_SIZE": '"5.0"'}  # fmt: skip
    assert problems(look(serve(V1), newest, environment=environment), "set-twice") == []
    assert problems(look(serve(V1), newest, environment=environment), "setting-values") == []


@pytest.mark.parametrize("name", ["LMCACHE_STORE_LOCATION", "LMCACHE_RETRIEVE_LOCATIONS"])
def test_a_variable_that_no_converter_takes(name: str, tmp_path: Path) -> None:
    """With a file, 0.4.2 to 0.5.2 convert every variable, and have no converter for these two (KVD900)."""
    environment = {name: "LocalCPUBackend"}
    with_file = Planted("environment-converted", serve(V1), "", "", environment, yaml="chunk_size: 256")
    old, right = (site(tmp_path / release, release, vllm=False) for release in ("0.5.2", "0.5.3"))
    (found,) = problems(with_file.setup(tmp_path, old), "environment-converted")
    assert name in found.what
    assert f"unset {name}" in found.do
    assert not problems(with_file.setup(tmp_path, right), "environment-converted")
    assert not problems(look(serve(V1), old, environment=environment), "environment-converted")
