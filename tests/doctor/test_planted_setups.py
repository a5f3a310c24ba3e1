"""Faults planted in how parts go together: chunks, hashes, parallel sizes, models, prefill and decode, addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.sites import MP, V1, Planted, look, problems, say, serve, site

LINEAR = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
#: Llama 3 8B in bfloat16: 2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB for a token, CHUNK bytes for 256 tokens.
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
CHUNK = 32 * 2**20
PD = {"lmcache.enable_pd": True, "lmcache.pd_role": "sender", "lmcache.pd_buffer_device": "cpu"}
#: Tried in test_planted_settings.py.
PLANTED = {
    "chunk and block": Planted("chunk-size", serve(V1, "--block-size", "48"),
        "256 is not a multiple of vLLM's block size 48", "240"),
    "a chunk for no block": Planted("chunk-size", serve(V1, extra={"lmcache.chunk_size": 100}), "not a multiple of 16",
        "128"),
    "chunk and DCP": Planted("chunk-size", serve(V1, "--block-size", "128", "-tp", "4", "-dcp", "4"), "times 4 ranks",
        "512"),
    "a cap below a chunk": Planted("load-cap", serve(V1, extra={"lmcache.max_tokens_per_load": 128}),
        "nothing is ever loaded", "256, or more"),
    "no hash seed": Planted("hash-seed", serve(V1, "-tp", "2"), "PYTHONHASHSEED is 'random'", "PYTHONHASHSEED=0"),
    "a hash seed that is none": Planted("hash-seed", serve(V1), "engines that share remote_url", "sha256_cbor",
        environment={"PYTHONHASHSEED": "random"}, yaml="remote_url: lm://h:1"),
    "servers and data parallel": Planted("parallel",
        serve(MP, "-tp", "2", "-dp", "2", extra={"lmcache.mp.server_urls": "a:1,b:2"}), "several LMCache servers",
        "--data-parallel-size 1"),
    "workers and servers": Planted("parallel", serve(MP, "-tp", "3", extra={"lmcache.mp.server_urls": ["a:1", "b:2"]}),
        "3 workers cannot be shared equally by 2", "that divides the number of workers"),
    "too few ports": Planted("parallel", serve(V1, "-tp", "2"), "has 1 ports for 2 workers", "[7300, 7301]",
        yaml="enable_pd: true\npd_peer_init_port: [7300]"),
    "DCP and TP": Planted("parallel", serve(V1, "-tp", "4", "-dcp", "3"), "does not divide",
        "--decode-context-parallel-size 2"),
    "DCP in process": Planted("parallel", serve(V1, "-tp", "4", "-dcp", "2"), "does not support --decode-context",
        "LMCacheMPConnector"),
    "no such layout": Planted("layout", serve(V1), "VLLM_KV_CACHE_LAYOUT=XYZ", "unset",
        environment={"VLLM_KV_CACHE_LAYOUT": "XYZ"}),
    "a layout that LMCache cannot move": Planted("layout", serve(V1), "cannot move", "unset",
        environment={"VLLM_KV_CACHE_LAYOUT": "LHBNC"}),
    "CacheBlend without its line": Planted("blending", serve(V1), "does not register the model with VLLMModelTracker",
        "enable_blending: false",
        yaml="enable_blending: true"),
    "PD without its settings": Planted("prefill-decode", serve(V1), "needs pd_role", "pd_role: sender",
        yaml="enable_pd: true"),
    "PD with the other role": Planted("prefill-decode", serve(V1, kv_role="kv_consumer"),
        "pd_role is sender, but kv_role is kv_consumer", "kv_producer",
        yaml="enable_pd: true\npd_role: sender\npd_buffer_size: 1000000"),
    "PD without NIXL": Planted("transfer-library", serve(V1), "nixl", "pip install nixl",
        yaml="enable_pd: true\ntransfer_channel: nixl"),
    "NIXL that is not there": Planted("transfer-library",
        serve({"kv_connector": "NixlConnector", "kv_role": "kv_both"}), "nixl", "pip install nixl"),
    "Mooncake that is not there": Planted("transfer-library",
        serve({"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}), "mooncake", "mooncake-transfer-engine"),
    "0.0.0.0 as a client": Planted("hosts", serve(MP, extra={"lmcache.mp.host": "tcp://0.0.0.0"}),
        "0.0.0.0 is an address to listen on", "host name or IP address"),
    "a host that is none": Planted("hosts", serve(MP, extra={"lmcache.mp.host": "tcp://no-such-host.invalid"}),
        "cannot resolve", "SERVICE.NAMESPACE"),
    "a port that is none": Planted("hosts", serve(MP, extra={"lmcache.mp.port": 99999}), "no port from 1 to 65535",
        "tcp://HOST:PORT"),
    "plugins without kvfix": Planted("plugins", serve(V1), "drops kvfix", "VLLM_PLUGINS=lora,kvfix",
        environment={"KVFIX": "fix", "VLLM_PLUGINS": "lora"}),
    "one port for two": Planted("listens", ["lmcache", "server", "--port", "5601", "--http-port", "5601"],
        "are both 5601", "another free port"),
    "a hybrid model": Planted("hybrid-model", serve(V1), "several KV groups", "kvfix explain KVD650",
        model={"model_type": "jamba", "attn_layer_period": 8}),
    "linear attention": Planted("hybrid-model", serve(V1), "several KV groups", "kvfix explain KVD650", model=LINEAR),
    "linear attention with the server": Planted("hybrid-model", serve(MP), "", "", model=LINEAR),
    "sliding windows": Planted("hybrid-model", serve(V1), "", "",
        model={"model_type": "gemma3", "layer_types": ["sliding_attention", "full_attention"]}),
    "full attention": Planted("hybrid-model", serve(V1), "", "", model={"model_type": "llama"}),
    "a buffer below a chunk": Planted("prefill-decode", serve(V1, extra={**PD, "lmcache.pd_buffer_size": CHUNK - 1}),
        "smaller than a chunk", "pd_buffer_size: 536870912", model=LLAMA),
    "a buffer of a chunk": Planted("prefill-decode",
        serve(V1, extra={**PD, "lmcache.pd_buffer_size": CHUNK, "lmcache.pd_skip_proxy_notification": True}), "", "",
        model=LLAMA),
    "a cache of few chunks": Planted("cpu-cache-size", serve(V1, extra={"lmcache.max_local_cpu_size": 0.1}),
        "holds 3.2 chunks of 256 tokens", "max_local_cpu_size: 2", model=LLAMA),
    "a cache of many chunks": Planted("cpu-cache-size", serve(V1, extra={"lmcache.max_local_cpu_size": 5.0}), "", "",
        model=LLAMA),
}  # fmt: skip


def test_one_engine_for_itself_needs_no_seed(newest: Path) -> None:
    assert [line.status for line in say(look(serve(V1), newest), "hash-seed")] == ["ok"]


@pytest.mark.parametrize(("lmcache", "found"), [("0.3.10", 1), ("0.5.6", 0)])
def test_an_old_release_hashes_none(lmcache: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.3.15, on Python before 3.12, a seed is not enough."""
    monkeypatch.setattr("sys.version_info", (3, 11))
    setup = look(serve(V1, "-tp", "2"), site(tmp_path, lmcache, vllm=False), environment={"PYTHONHASHSEED": "0"})
    assert len(problems(setup, "hash-seed")) == found


@pytest.mark.parametrize(
    ("transfer", "more", "environment", "status"),
    [
        (MP, (), {}, ["problem"]),
        (MP, (), {"KVFIX": "off"}, ["problem"]),
        (MP, (), {"KVFIX": "check"}, ["ok"]),
        (MP, ("--disable-hybrid-kv-cache-manager",), {}, []),
        (V1, (), {}, []),
    ],
)
def test_stores_of_sliding_windows(
    transfer: dict[str, Any],
    more: tuple[str, ...],
    environment: dict[str, str],
    status: list[str],
    tmp_path: Path,
    newest: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["sliding_attention", "full_attention"]}))
    words = ["vllm", "serve", str(tmp_path), "--kv-transfer-config", json.dumps(transfer), *more]
    found = say(look(words, newest, environment=environment), "sliding-windows")
    assert [line.status for line in found] == status
    assert all("KVF118, KVF119" in line.what for line in found)


@pytest.mark.parametrize(
    ("lmcache", "yaml", "found"),
    [
        ("0.3.12", "local_disk: /tmp/x\nmax_local_disk_size: 5", "cannot write keys of bytes"),
        ("0.3.12", "chunk_size: 256", ""),
        ("0.3.13", "local_disk: /tmp/x\nmax_local_disk_size: 5", ""),
        ("0.4.5", "enable_async_loading: true", "needs hashes that are numbers"),
        ("0.4.6", "enable_async_loading: true", ""),
    ],
)
def test_a_hash_that_is_bytes(
    lmcache: str, yaml: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVD739 and KVD738, before the launch; a seed helps there from Python 3.12 on."""
    planted = Planted("hash-seed", serve(V1), "", "", {}, f"{yaml}\npre_caching_hash_algorithm: sha256_cbor")
    setup = planted.setup(tmp_path, site(tmp_path / "place", lmcache))
    said = problems(setup, "hash-seed")
    assert [line.what for line in said if found and found in line.what] == [line.what for line in said]
    assert bool(said) == bool(found)
    for version_info, seed in (((3, 11), lmcache >= "0.4.1"), ((3, 12), True)):  # KVF901
        monkeypatch.setattr("sys.version_info", version_info)
        assert all(("PYTHONHASHSEED=0" in line.do) == seed for line in problems(setup, "hash-seed"))
