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
