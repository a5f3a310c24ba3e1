"""What a text says without a line of a log: releases, assertions in prose, a hybrid model whose error is cut off."""

from __future__ import annotations

import re

import pytest

from kvfix_tools.diagnose.problems import Problem, catalogue
from kvfix_tools.diagnose.releases_said import said
from tests.diagnose.lines import NEWEST, codes, diagnose, logged
from tests.diagnose.releases import CORE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- lmcache version : 0.3.9.post2\n- **vLLM**: 0.10.2", {"lmcache": "0.3.9.post2", "vllm": "0.10.2"}),
        ("vLLM (v0.8.5), LMCache (v0.2.11), Mooncake (0.3.0)", {"vllm": "0.8.5", "lmcache": "0.2.11"}),
        ("lmcache==0.3.3 vllm==0.9.2rc2", {"lmcache": "0.3.3", "vllm": "0.9.2rc2"}),
        ("lmcache             0.4.2\nName: vllm\nVersion: 0.11.0", {"lmcache": "0.4.2", "vllm": "0.11.0"}),
        ("image: lmcache/vllm-openai:v0.3.6", {"lmcache": "0.3.6"}),
        ("runner:cuda12.9-vllm0.13.0", {"vllm": "0.13.0"}),
        ("vllm-ascend 0.9.1, lmcache-ascend v0.3.7", {}),
        ("upgrade to vLLM 0.12.0; vllm>=0.10.0; worked in LMCache 0.3.2", {}),
        ("LMCache 0.3.2 is right, LMCache 0.3.4 crashes", {}),
    ],
)
def test_a_text_names_releases(text: str, found: dict[str, str]) -> None:
    assert said(text) == found


def test_a_line_of_the_log_outweighs_what_is_said() -> None:
    line = logged(NEWEST, "asked", "r1", 900, 0)
    assert diagnose("LMCache 0.3.9\n").releases.one("lmcache") == "0.3.9"
    assert diagnose(f"LMCache 0.3.9\n{line}").releases.one("lmcache") != "0.3.9"
    assert diagnose(f"LMCache {NEWEST}\n{line}").releases.one("lmcache") == NEWEST


def test_an_exception_may_have_a_blank_before_its_colon() -> None:
    """As a title has it that was typed; the log's settings stand above it."""
    settings = "INFO 07-11 12:28:36 [cli_args.py:325] non-default args: {'host': '0.0.0.0'}\n"
    title = "AssertionError : assert issubclass(connector_cls, KVConnectorBase)\n"
    assert codes(diagnose(settings, title)) == ["KVD741"]


def test_a_short_message_is_known_where_it_is_quoted() -> None:
    """Its words alone are too few; marks of a quotation say that they are a message."""
    text = "The cache server says `Invalid key string: {s}` to each engine.\n" + "How is that?\n" * 20
    assert codes(diagnose(text)) == ["KVD899"]
    assert codes(diagnose(text.replace("`", ""))) == []


def test_an_assertion_in_a_title_is_known_by_its_condition() -> None:
    title = "Fatal error on the second request (AssertionError: memory_obj.tensor is not None)\n"
    assert codes(diagnose(f"{title}LMCache: 0.3.10.post2\n")) == ["KVD801"]
    assert codes(diagnose("AssertionError: what a thing is this\n")) == ["KVD199"]


WARNED = (
    "(EngineCore_DP0 pid=251) WARNING 03-04 12:47:30 [kv_cache_utils.py:1170] Hybrid KV cache manager is disabled for "
    "this hybrid model, This means we do not\n"
)
CUT = f'{CORE}Traceback (most recent call last):\n{CORE}  File "/opt/app/vllm/v1/engine/core.py", line 7, in run\n'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (WARNED + CUT, "KVD650"),
        (f"gpt-oss-120b\n{WARNED}{CUT}", "KVD1148"),
        (f"{WARNED}{CUT}{CORE}    call()\n{CORE}RuntimeError: boom\n", "KVD199"),
        ("Qwen/Qwen3-Coder-Next with LMCacheConnectorV1 fails at its start\n", "KVD650"),
        ("vLLM 0.33.0: Qwen/Qwen3-Coder-Next with LMCacheConnectorV1 fails at its start\n", ""),
        ("Qwen/Qwen3-8B with LMCacheConnectorV1 fails at its start\n", ""),
    ],
)
def test_a_hybrid_model_is_known_where_the_error_is_cut_off(text: str, code: str) -> None:
    assert codes(diagnose(text)) == ([code] if code else [])


SERVER = {
    "KVD1220": "The external hit rate stays at 0.0% with LMCacheMPConnector.\n",
    "KVD1244": "LMCache in MP mode: from another node vLLM does not connect to this server\n",
    "KVD1230": "LMCache 0.5.5 in MP mode: the scheduler's heartbeat does not start\n",
    "KVD1232": "LMCache in MP mode: heartbeat, degraded for 2 minutes after a restart\n",
    "KVD1234": "LMCacheMPConnector ignores save_decode_cache\n",
    "KVD1259": 'msg="Duplicate sample for timestamp" series="lmcache_mp_l2_adapters{state=7}"\n',
    "KVD1260": "hit rate: 0.0%, and nothing is stored:\nlmcache server --chunk-size 544 --l1-size-gb 8\n",
    "KVD1274": "remote_url: lm://h:8000, and `lmcache server --port 8000`: the connection ends after 30 seconds\n",
    "KVD1240": "LMCacheMPConnector: a retrieve stands in WAITING_FOR_REMOTE_KVS forever\n",
}
USE = {
    "KVD1226": 'LMCache\'s /lookup gives {"event_id": "x", "layout_info": {}}\n',
    "KVD1228": "redis for lmcache: the second request is slower than the first\n",
    "KVD1236": "lmcache:num_hit_tokens_total is 0\n",
    "KVD1238": "LMCache 0.5.2: answers are garbled with the packed KV\n",
    "KVD1250": "LMCache 0.4.5, enable_async_loading: true and use_layerwise: true: 0 hits\n",
    "KVD1246": "LMCache does not cache the answers\n",
    "KVD1790": "LMCache 0.3.12: blending does not reuse the second segment\n",
    "KVD1792": "LMCache 0.3.9: the preempted request is not loaded\n",
    "KVD1248": "LMCache: the hit rate drops over time\n",
    "KVD1674": "With LMCache an aborted request crashes the engine\n",
    "KVD1242": "LMCache, enable_pd: true, and the decoder recomputes each prompt\n",
}
DESCRIBED = {
    "KVD525": "LMCache 0.3.1 with xPyD: the nixl buffer has no room, and it does a retry over and over\n",
    "KVD607": "OffloadingConnector: prepare_store() may fail, and then the engine gets a fatal error\n",
    "KVD770": "LMCache: DeepSeek-V3.2 gets a shape mismatch\n",
    "KVD856": "lmcache.yaml has max_local_cpu_size: 0, and the remote backend cannot be made\n",
    "KVD867": "LMCache with redis: AssertionError in vllm_v1_adapter.py on a slow network\n",
    "KVD902": "LMCache server without a GPU: Device UUID of the worker is not found\n",
    "KVD920": "LMCache MP: after each server restart no worker will reconnect\n",
    "KVD497": "LMCache's resp adapter takes a single host, and ours is a Valkey cluster\n",
    "KVD697": "The controller has dropped all: a deregister by the check of what never sent a heartbeat\n",
    "KVD866": "lmcache_server does not evict: an OOM each night\n",
    "KVD881": "LMCache: the S3 bucket is asked in path style only\n",
    "KVD885": "A timeout when putting into Mooncake, after a pod restart\n",
    "KVD886": "Mooncake 0.3.13 is the master, and the older client's put gives rc -900\n",
    "KVD910": "RequestType has other numbers in adjacent releases: each request will time out\n",
    "KVD467": "lmcache server --engine-type blend: CB_REGISTER_ROPE_V3 comes from no client\n",
    "KVD907": "LMCacheMPConnector: the server retains VRAM of a worker that was killed\n",
    "KVD723": "vLLM's fallback LMCacheMPWorkerAdapter raises TypeError for a new argument\n",
    "KVD962": "LMCache: cpuinfo.get_cpu_info() and a JSONDecodeError at the start\n",
    "KVD939": "LMCache says `Some keys not found during retrieve!`, and then the text is gibberish\n",
    "KVD1279": "OffloadingConnector with Llama-4: an AssertionError when vLLM starts\n",
    "KVD1316": "LMCache v0.5.0: multimodal prompts with different images get the wrong answer\n",
    "KVD1318": "Multi-LoRA with LMCache: the key does not name the adapter\n",
    "KVD1320": """vllm serve m --kv-transfer-config '{"kv_connector":"LMCacheConnector"}': not one key in redis\n""",
    "KVD1322": 'remote_url: "mooncakestore://h:1", remote_serde: "cachegen": the second request doesn\'t retrieve it\n',
    "KVD701": "LMCache 0.3.3: undefined symbol _ZN3c104cuda9SetDeviceEa\n",
    "KVD702": "torchac_cuda has an undefined symbol\n",
    "KVD441": "No vllm-openai docker images for 0.4.4\n",
    "KVD901": "lmcache/vllm-openai:2025-05-17-v1: there was no torch in the container\n",
    "KVD1350": "lmcache/standalone:v0.4.5 returns ModuleNotFound when it imports `openai`\n",
    "KVD1352": "LMCache: vLLM crashes before the remote server has come up\n",
    "KVD1358": "vLLM 0.15.1: CPU offload with FlashInfer breaks for gpt-oss\n",
    "KVD1336": "LMCache: no KV blocks were offloaded to NVMe\n",
    "KVD1334": "production-stack: the router pod is in CrashLoopBackOff\n",
    "KVD1324": "LMCache 0.5.1 and gpt-oss with an L2 on NIXL: errors\n",
    "KVD1676": "AIBrixOffloadingConnectorV1Type2 ends with a KeyError\n",
    "KVD384": "lmcache server has a bus error in docker\n",
    "KVD790": "lmcache: the example of cpu-offload says that memory cannot be allocated\n",
    **SERVER,
    **USE,
    "KVD543": "vLLM 0.20.0 with P2pNcclConnector: the decoder hangs\n",
    "KVD562": "NIXL: a segfault in loadRemoteMD after a restart of prefill\n",
    "KVD127": "KVBM: onboarding from disk to device hangs\n",
    "KVD1727": "AscendStoreConnector: blocks are never freed, and prefill is in a deadlock\n",
    "KVD1360": "vLLM 0.6.5 with PyNcclConnector: the requests hang\n",
    "KVD1366": "vLLM 0.22.1 deadlocks under KV cache pressure with an offloading connector\n",
    "KVD1368": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=300000: the blocks of prefill are exhausted\n",
    "KVD1370": "AscendStoreConnector: keys with pp_rank:1 end with TRANSFER_FAIL\n",
    "KVD1376": "vLLM 0.26.0 and NIXL with HMA: after a failed read the tokens are corrupt\n",
    "KVD1378": "NixlConnector with examples/disagg_proxy_demo.py: decode computes the prompt again\n",
    "KVD1382": "CPU offloading in vLLM 0.26.0: PP ranks have other num_blocks\n",
    "KVD688": "NixlPushConnector: the blocks of an aborted load are never reclaimed\n",
    "KVD618": "The offload tier discards what is parked after 60s\n",
    "KVD196": "Mooncake: action=client_expired\n",
    "KVD1128": "LMCache with two ranks: pd_peer_init_port, index out of range\n",
    "KVD720": "The image ends in `ModuleNotFoundError` for lmcache\n",
    "KVD621": "vLLM with --kv-offloading-size: cuMemcpyBatchAsync failed\n",
    "KVD807": "LMCache 0.3.10, layerwise, with async scheduling: StopIteration\n",
    "KVD808": "LMCache in freeze mode: layerwise stores end in StopIteration\n",
    "KVD919": "LMCache 0.4.4 is degraded, and start_load_kv asserts\n",
    "KVD471": "LMCache 0.3.3 with local_disk: a .pt was deleted, and the engine dies\n",
    "KVD577": "Prefill ends in KeyError: NixlConnector deletes a request from _reqs_to_send\n",
    "KVD428": "LMCacheConnectorV1Dynamic does not start: its role is None\n",
    "KVD1726": "NIXL: decode was restarted, then UCX AM send failed with status -80 (Endpoint timeout)\n",
    "KVD921": "The server of LMCache hangs in _release_entries\n",
    "KVD1730": "NIXL with Mooncake ends in UnicodeDecodeError\n",
    "KVD838": "LMCache: what is read from local_disk cannot be allocated\n",
    "KVD848": "LMCache 0.3.1 with cpu offload: a leak\n",
    "KVD841": "LMCache: the GDS pool fills up, and stores are dropped\n",
    "KVD805": "LMCache ends in KeyError with layerwise storage\n",
    "KVD153": "LMCache fails to allocate for a prompt, with enable_pd: true and pd_buffer_size: 1073741824\n",
    "KVD628": "Offloading: a single registration with cudaHostRegister fails, and CUDA error: out of memory follows\n",
    "KVD625": "Files vllm_offload_1.mmap in /dev/shm are left behind by an engine that was killed\n",
    "KVD703": "LMCache on ROCm: the symbol alloc_pinned_ptr is not there\n",
    "KVD1761": "CPUOffloadingSpec: host memory is a power of two for each rank\n",
    "KVD1767": "OffloadingConnector: _blocks_being_loaded lets the second one wait\n",
    "KVD1764": "SimpleCPUOffload: text is garbled, with concurrent requests alone\n",
    "KVD864": "lm://h:1: after a restart each put ends in Broken pipe\n",
    "KVD1843": "export LM_CACHE_CHUNK_SIZE=256 for vLLM\n",
    "KVD1845": "python_ops_fallback.py ends in a segfault\n",
    "KVD407": "Blending with LMCache: eviction after the lookup, and fewer tokens come\n",
}


def test_the_source_of_an_assertion_without_its_frames_is_known_by_the_function_that_the_text_names() -> None:
    abort = "An abort ends with AssertionError in `request_finished`:\n    assert self.lmcache_engine is not None\n"
    assert codes(diagnose(abort)) == ["KVD108"]
    stale = "AssertionError: assert req_id in self.requests\n"
    assert codes(diagnose(stale)) == ["KVD109"]
    assert codes(diagnose(stale.replace("requests", "others_of_mine"))) == ["KVD199"]


def test_engines_without_one_seed_are_no_matter_of_the_serializer() -> None:
    text = "Two vLLM engines with LMCache, hits do not happen.\nremote_url: lm://h:1\nremote_serde: cachegen\n"
    assert codes(diagnose(text)) == ["KVD1206"]
    assert "no PYTHONHASHSEED, and remote_serde is cachegen" in diagnose(text).findings[0].sentence
    assert codes(diagnose(text.replace("do not happen", "are wrong") + "PYTHONHASHSEED=0\n")) == ["KVD1322"]


def test_pods_in_a_list_are_not_the_router_that_crashes() -> None:
    pods = "production-stack, LMCache\nvllm-router-1 Running\nvllm-engine-1 CrashLoopBackOff\n"
    assert "KVD1334" not in codes(diagnose(pods))
    assert codes(diagnose(pods.replace("router-1 Running", "router-1 CrashLoopBackOff"))) == ["KVD1334"]


def test_a_title_outweighs_the_work_after_it() -> None:
    error = "LMCache ERROR: The number of retrieved tokens is less than the expected number of tokens!\n"
    work = logged(NEWEST, "asked", "r1", 900, 0) * 2
    assert codes(diagnose(error, work)) == ["KVD195"]
    assert "KVD195" not in codes(diagnose("a word\n", error, work))


def test_an_import_of_lmcache_that_is_cut_off() -> None:
    shim, adapter = "vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py", "lmcache/c.py"
    lines = [f'{CORE}  File "/opt/app/{file}", line 7, in <module>\n' for file in (shim, adapter)]
    assert codes(diagnose(f"{CORE}Traceback (most recent call last):\n", *lines)) == ["KVD1326"]
    other = lines[0].replace("lmcache", "other")
    assert codes(diagnose(f"{CORE}Traceback (most recent call last):\n", other)) == ["KVD1148"]


def test_a_hook_that_only_hands_on_does_not_say_what_failed() -> None:
    """KVD788 is an error in `wait_for_save` of LMCache's adapter; here it is cut off one frame before."""
    file = "/opt/app/vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py"
    assert codes(
        diagnose(f'{CORE}Traceback (most recent call last):\n{CORE}  File "{file}", line 7, in wait_for_save\n')
    ) == ["KVD1148"]


@pytest.mark.parametrize("problem", [each for each in catalogue() if each.said], ids=lambda each: str(each.name))
def test_a_record_without_a_line_is_described(problem: Problem) -> None:
    text = DESCRIBED[problem.code]
    assert codes(diagnose(text)) == [problem.code]
    # With a failure that is known, or one that is not, the description is not the finding.
    assert problem.code not in codes(diagnose(text, f"{CORE}RuntimeError: boom\n"))
    for each in problem.said:
        assert problem.code not in codes(diagnose(re.sub(each, "", text))), each


@pytest.mark.parametrize(("release", "code"), [("0.26.0", "KVD1238"), ("0.15.1", "KVD1202")])
def test_wrong_text_of_a_release_with_packed_kv_is_that(release: str, code: str) -> None:
    assert codes(diagnose(f"# LMCache P/D with vLLM {release}: the decoding diverges at token 0\n")) == [code]
    assert codes(diagnose(f"# lmcache server, vLLM {release}: the decoding diverges at token 0\n")) == ["KVD1202"]


def test_what_python_says_of_any_class_is_no_connectors() -> None:
    """KVD1100 has these words of a connector that vLLM's factory makes; here a router's class is spoken of."""
    text = "# router fails\nERROR: StaticServiceDiscovery.__init__() missing 7 required positional arguments: 'app'\n"
    assert not {"KVD1100", "KVD061"} & set(codes(diagnose(text)))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        # The source, with a sentence that goes on; the function, of whose assertions the text has the names; and the
        # function alone, which has one assertion in all releases.
        ("# P\u8282\u70b9\u56e0 assert req_id in self.requests \u5d29\u6e83\n", "KVD109"),
        ("It dies of an assertion in _update_from_kv_xfer_finished: req_id is no more in self.requests.\n", "KVD109"),
        ("vLLM 0.22.1: the `_mamba_block_aligned_split` assert is hit\n", "KVD653"),
        # Of several assertions none is named; no assertion is spoken of; a release that has it right.
        ("It dies of an assertion in _update_from_kv_xfer_finished.\n", ""),
        ("Look at _mamba_block_aligned_split of vLLM 0.22.1\n", ""),
        ("vLLM 0.32.0: the `_mamba_block_aligned_split` assert is hit\n", ""),
        ("The code has assert req_id in self.requests_of_others\n", ""),
    ],
)
def test_an_assertion_in_a_sentence_is_known_by_its_function(text: str, code: str) -> None:
    assert codes(diagnose(text)) == ([code] if code else [])


def test_a_release_that_is_right_is_not_described() -> None:
    assert "KVD1316" not in codes(diagnose(DESCRIBED["KVD1316"].replace("0.5.0", "0.5.5")))
    assert codes(diagnose(DESCRIBED["KVD1324"].replace("0.5.1", "0.5.3"))) == []


def test_an_attribute_may_be_missed_without_the_name_of_the_exception() -> None:
    title = "# LMCacheConnectorV1Impl has no attribute 'layerwise_storers'\n"
    assert codes(diagnose(title)) == ["KVD415"]
    assert codes(diagnose(title.replace("layerwise_storers", "some_other"))) == []


def test_a_sentence_may_say_where_an_exception_was_raised() -> None:
    text = "The next question is a KeyError at lmcache_async_lookup_client.py:175\n"
    assert codes(diagnose(text)) == ["KVD114"]
    assert codes(diagnose(text.replace("async_lookup", "bypass_lookup"))) == []


def test_a_line_that_heads_a_traceback_is_a_finding_where_a_text_quotes_it() -> None:
    assert codes(diagnose('LMCache: `logger.exception("Cannot retrieve keys due to exception")` is hit\n')) == [
        "KVD915"
    ]


def test_a_size_from_which_on_a_start_fails_is_the_buffers() -> None:
    cut = f"{CORE}EngineCore failed to start.\n{CUT}"
    assert codes(diagnose(f"Fails with LMCache where the cpu offload is larger than 200GB\n{cut}")) == ["KVD1200"]
    assert codes(diagnose(f"Fails with LMCache where the cpu offload is larger than 2GB\n{cut}")) == ["KVD1148"]


def test_what_python_says_of_any_attribute_is_no_check_of_a_connector() -> None:
    found = diagnose("AttributeError: 'NoneType' object has no attribute 'name'\n").findings
    assert all("rpc is None" not in each.sentence for each in found)


def test_an_attribute_may_be_missed_in_a_line_without_the_exception() -> None:
    """Below a traceback that was cut, as a title has it."""
    cut = 'Traceback (most recent call last):\n  File "/vllm/executor/executor_base.py", line 138, in execute_model\n'
    assert codes(diagnose(cut, "'DeepseekV2Model' object has no attribute 'config'\n")) == ["KVD1257"]
    assert codes(diagnose(cut, "'OPTModel' object has no attribute 'some_other'\n")) == ["KVD252"]


def test_the_reason_of_a_store_may_stand_lines_below_it() -> None:
    failed = "2026-04-09 00:35:28.544 [ERROR] [thread:7] Store failed for\n/kv/7.bin:\n"
    why = "Cannot access data pointer of Tensor that doesn't have storage\n"
    assert codes(diagnose(failed, why)) == ["KVD1256"]
    assert codes(diagnose(failed, "No space left on device\n")) != ["KVD1256"]


def test_a_traceback_may_have_the_line_breaks_of_a_page() -> None:
    """And its exception before its frames: what LMCache's engine calls there ends in the CPU backend's assertion."""
    frame = '  File "/lmcache/v1/cache_engine.py", line 263, in store<br>\n'
    source = "    memory_obj = self.storage_manager.allocate(<br>\n"
    assert codes(diagnose("AssertionError<br>\n", frame, source)) == ["KVD852"]
