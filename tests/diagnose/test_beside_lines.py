"""What few lines of a log leave open, and what stands beside them tells."""

from __future__ import annotations

from kvfix_tools.diagnose import advice
from tests.diagnose.lines import codes, diagnose, vllm
from tests.diagnose.releases import CORE


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
