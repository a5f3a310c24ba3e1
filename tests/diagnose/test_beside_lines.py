"""What few lines of a log leave open, and what stands beside them tells."""

from __future__ import annotations

import pytest

from kvfix_tools.diagnose import advice
from tests.diagnose.lines import NEWEST, codes, diagnose, logged, version, vllm, vllm_unread
from tests.diagnose.releases import CORE
from tests.diagnose.test_problems import VLLM


def test_an_exception_of_a_sentence_tells_what_a_doubted_line_leaves_open() -> None:
    freed = "- `LMCache WARNING: Trying to access an invalidated MemoryObj`\n"
    copied = "- `TypeError: copy_(): argument 'other' (position 1) must be Tensor, not NoneType` in gpu_connector.py\n"
    cut = f'{CORE}  File "/torch/fx/graph_module.py", line 406, in __call__\n{CORE}    raise e\n'
    assert codes(diagnose(freed, cut)) == ["KVD802"]
    assert codes(diagnose(freed, copied, cut)) == ["KVD819"]


def test_an_assertion_in_words_is_the_bare_one() -> None:
    words = "AssertionError: Slot mapping and token IDs length mismatch!\n"
    assert codes(diagnose(words)) == ["KVD112"]
    assert codes(diagnose(words.replace("Slot", "Block"))) == ["KVD199"]


def test_a_chunk_of_the_disk_is_known_by_its_name_in_a_load() -> None:
    frame = f'{CORE}Traceback (most recent call last):\n{CORE}  File "/lmcache/a.py", line 7, in start_load_kv\n'
    gone = f"{CORE}FileNotFoundError: [Errno 2] No such file or directory: '/kv/vllm@m@2@0@77.pt'\n"
    assert codes(diagnose(frame, gone)) == ["KVD471"]
    assert codes(diagnose(frame, gone.replace("@2@0@77", ""))) == ["KVD228"]


def test_a_wait_in_a_text_on_nixl_has_no_remedy_of_lmcache() -> None:
    waits = vllm("kv_waiting", "cmpl-7") * 2
    others = [waits, "The sidecar speaks nixl v1.\n"]
    for given, named in ((others[:1], True), (others, False), ([*others, "LMCache too\n"], True)):
        log = diagnose(*given)
        assert codes(log) == ["KVD208"]
        assert ("KVF104" in advice.remedy(log, log.findings[0]).now) is named


def test_an_abort_that_ends_in_an_assertion_is_known_from_a_cut_traceback() -> None:
    frame = f'{CORE}Traceback (most recent call last):\n{CORE}  File "/vllm/v1/engine/core.py", line 7, in step\n'
    aborts, other = f"{CORE}    self._process_aborts_queue()\n", f"{CORE}    self._process_input_queue()\n"
    assert codes(diagnose(frame, aborts, f"{CORE}AssertionError\n")) == ["KVD108"]
    assert codes(diagnose(frame, other, f"{CORE}AssertionError\n")) != ["KVD108"]


def test_a_setting_behind_a_cut_traceback_is_no_exception() -> None:
    cut = f'{CORE}Traceback (most recent call last):\n{CORE}  File "/vllm/utils.py", line 7, in run_method\n'
    log = diagnose(cut, f"{CORE}    return func(*args)\n", "local_cpu: False\n")
    assert codes(log) == ["KVD1148"]
    assert "False" not in log.findings[0].sentence


def test_the_pipes_own_failure_is_not_the_general_one_of_v0() -> None:
    frame = '  File "/vllm/distributed/kv_transfer/kv_pipe/pynccl_pipe.py", line 7, in recv_tensor\n    raise e\n'
    waited = "ERROR 12-02 17:11:14 pynccl_pipe.py:262] wait timeout after 300000ms, keys: /send_to/0/4\n"
    assert codes(diagnose(waited, "Traceback (most recent call last):\n", frame)) == ["KVD379"]
    assert codes(diagnose("Traceback (most recent call last):\n", frame)) == ["KVD003"]


def cut_at(frame: str, line: str) -> str:
    """A traceback that ends in this frame and its line."""
    return f"{CORE}Traceback (most recent call last):\n{CORE}  File {frame}\n{CORE}    {line}\n"


def test_a_chunk_that_is_gone_is_known_from_the_frame_that_reads_it() -> None:
    frame = '"/lmcache/v1/storage_backend/local_disk_backend.py", line 380, in get_blocking'
    assert codes(diagnose(cut_at(frame, "memory_obj = self.load_bytes_from_disk("))) == ["KVD814"]
    assert codes(diagnose(cut_at(frame, "self.disk_lock.acquire()"))) == ["KVD1148"]


def test_an_assertion_beside_a_cut_traceback_is_its_end() -> None:
    cut = cut_at('"/python3.12/multiprocessing/process.py", line 314, in _bootstrap', "self.run()")
    assert codes(diagnose(cut, "assert num_new_tokens > 0\n")) == ["KVD398"]
    assert codes(diagnose(cut, "num_new_tokens > 0\n")) == ["KVD1148"]


def test_a_layerwise_store_that_ended_is_known_by_the_context_that_was_left() -> None:
    worker = '"/vllm/v1/worker/kv_connector_model_runner_mixin.py", line 117, in '
    ends = "generator raised StopIteration\n"
    saves = "kv_connector.wait_for_save()"
    assert codes(diagnose(cut_at(f"{worker}_get_kv_connector_output", saves), ends)) == ["KVD807"]
    assert codes(diagnose(cut_at(f"{worker}execute_model", "next(layers)"), ends)) == ["KVD1132"]


def test_what_a_text_complains_of_is_more_than_a_warning_of_the_start() -> None:
    server, small = "lmcache server --chunk-size 544\n", "LMCache WARNING: Insufficient /dev/shm capacity: nee\n"
    unseen = "Session chatcmpl-1 not found, skipping touch\n`External prefix cache hit rate: 0.0%`\n"
    assert codes(diagnose(server, unseen, small)) == ["KVD1260"]
    assert codes(diagnose(server, small)) == ["KVD913"]


def test_a_line_without_its_head_counts_beside_lines_that_say_nothing() -> None:
    full = "Failed to allocate memory block of size 4096 because no memory is available\n"
    cut = "LMCache WARNING: Failed to allocate memory block of size 15\n"
    assert codes(diagnose(cut, full)) == ["KVD171"]
    assert codes(diagnose(cut, *[VLLM.format(level="INFO", text="it works")] * 99, full)) == []  # a log, not a paste
    dropped = "Local cpu memory under pressure\n"
    stores = logged(NEWEST, "asked", "r1", 900, 0, 0, 900)
    assert codes(diagnose(dropped)) == ["KVD404"]
    assert codes(diagnose(stores, full)) == []


def test_the_death_that_a_text_names_replaces_what_the_peer_saw() -> None:
    peer = "W0904 10:52:53.047694     512 ucx_utils.cpp:62] Unexpected UCX error: Request canceled\n" * 3
    assert codes(diagnose(peer)) == ["KVD586"]
    death = "Prefill dies of a KeyError in NixlConnector: it deletes a request from _reqs_to_send.\n"
    assert codes(diagnose(death, peer)) == ["KVD577"]
    assert codes(diagnose(death.replace("KeyError", "timeout"), peer)) == ["KVD586"]


def test_an_exception_that_a_report_sets_bold_is_one() -> None:
    frame = 'Traceback (most recent call last):\n  File "/app/blend.py", line 3, in <module>\n    import lmcache_vllm\n'
    log = diagnose(frame, "**ModuleNotFoundError: No module named 'lmcache_vllm'**\n", "OS: Ubuntu\n")
    assert codes(log) == ["KVD721"]
    assert "Ubuntu" not in log.findings[0].sentence


def test_a_fix_names_its_releases_where_the_log_does_not_name_one() -> None:
    twice = logged(NEWEST, "double_unpin", 7, -1)
    log = diagnose(twice.partition(" \x1b[3m(")[0] + "\n")  # its line of source says which releases
    assert "KVF013 fetched-chunks-released-twice (for LMCache 0.4.1 to " in advice.remedy(log, log.findings[0]).now
    log = diagnose(version(NEWEST), twice)
    assert "KVF013 fetched-chunks-released-twice: kvfix run" in advice.remedy(log, log.findings[0]).now


def test_what_a_text_tells_replaces_the_kind_of_failure() -> None:
    ended = "nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT\n"
    sent = "Decode was restarted, and UCX AM send failed with status -80 (Endpoint timeout) in NIXL.\n"
    assert codes(diagnose(ended)) == ["KVD373"]
    assert codes(diagnose(sent, ended)) == ["KVD1726"]
    assert codes(diagnose(sent.replace("restarted", "slow"), ended)) == ["KVD373"]


def test_a_store_that_was_refused_explains_a_cut_traceback() -> None:
    refused = VLLM.format(level="WARNING", text="Cannot store 21 blocks")
    cut = cut_at('"/vllm/v1/core/sched/scheduler.py", line 7, in _build_kv_connector_meta', "return self.connector.x(")
    assert codes(diagnose(cut)) == ["KVD1148"]
    assert codes(diagnose(refused, cut)) == ["KVD155"]


def test_an_assertion_may_go_on_in_the_next_lines() -> None:
    file, bound = "vllm/offloading/scheduler.py\nAssertionError:\n    num_pending_gpu_blocks\n", "    <= sliding_"
    assert codes(diagnose(file, f"{bound}window_size_in_blocks * block_size_factor\n")) == ["KVD603"]
    assert codes(diagnose(file)) != ["KVD603"]


@pytest.mark.parametrize(("release", "verdict"), [("0.3.12", "unknown"), (NEWEST, "violated")])
def test_a_chunk_may_have_been_evicted_where_a_load_does_not_ask_again(release: str, verdict: str) -> None:
    log = diagnose(version(release), logged(release, "unretrievable"), logged(release, "short", 0, 31))
    assert [(found.rule.code, found.verdict) for found in log.findings] == [("KVD1090", verdict)]


def test_a_cut_traceback_is_shown_where_it_ends() -> None:
    frame = '"/lmcache/v1/any.py", line 7, in allocate'
    log = diagnose("a word\n", cut_at(frame, "self.pool.take("), "```\n")
    assert str(log.findings[0].evidence[0]).endswith(":4: self.pool.take(")


def test_a_line_that_only_heads_a_traceback_says_that_it_is_cut() -> None:
    line = VLLM.format(level="ERROR", text="WorkerProc hit an exception.")
    assert codes(diagnose(line)) == ["KVD1148"]
    warned = "Hybrid KV cache manager is disabled for this hybrid model, This means\n"
    assert codes(diagnose(warned, line)) == ["KVD650"]
    assert codes(diagnose(line.replace("exception.", "exception. It is broken"))) != ["KVD1148"]


def test_of_two_descriptions_the_one_counts_that_replaces_the_other() -> None:
    old = '--kv-transfer-config {"kv_connector":"LMCacheConnector"} does not work with vllm\n'
    assert codes(diagnose(old)) == ["KVD1320"]
    assert codes(diagnose(old, "LM_CACHE_CHUNK_SIZE: 256\n")) == ["KVD1843"]


def test_a_limit_that_vllm_warns_of_is_no_failure() -> None:
    """What vLLM says at each start below 65535 open files (system_utils.py 0.32.0:255)."""
    warned = vllm_unread("vllm/utils/system_utils.py", "Found ulimit of", 20000, "current limit exceeds maximum limit")
    assert "Too many open files" in warned
    assert codes(diagnose(warned)) == []
    assert codes(diagnose("OSError: [Errno 24] Too many open files\n")) == ["KVD219"]
