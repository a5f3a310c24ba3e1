"""Lines that native code prints are read, with the words that say why."""

from __future__ import annotations

import pytest

from tests.diagnose.lines import codes, diagnose, scanned

WORKS = "(EngineCore pid=7) INFO 12-03 01:24:36 [core.py:7] any line\n"
UCX = "[1784273406.612345] [node7:99   :a]  "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"{UCX}tcp_ep.c:452  UCX  ERROR   tcp_ep 0x55: send(7) failed: Connection reset by peer", "KVD224"),
        (f"{UCX}ib_mlx5_log.c:171  UCX  DIAG  Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15)", "KVD1305"),
        ("[node7:99   :0:99] ib_mlx5_log.c:171  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15)", "KVD1305"),
        ("[node7:99   :0:1234] Caught signal 11 (Segmentation fault: address not mapped to object)", "KVD587"),
        ("backtrace (tid:  59888)\n 0  /x/nixl.libs/libucs-36b9.so.0.0.0(ucs_handle_error+0x304) [0x7ff4]", "KVD587"),
        ("F1125 12:00:00.123456  4242 transfer_engine_impl.cpp:77] Check failed: local != nullptr", "KVD199"),
        ("F20261125 12:00:00.123456  4242 master.cc:77] Check failed: a == b (1 vs. 2)", "KVD199"),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  cannot map", "KVD249"),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access "
         "was encountered", "KVD240"),
        ("terminate called without an active exception", "KVD249"),
        ("  what():  std::bad_alloc", "KVD218"),
        ("RuntimeError: NCCL Error 5: invalid usage (run with NCCL_DEBUG=WARN for details)", "KVD243"),
        ("thread 'main' panicked at lib/bindings/kvbm/src/blocks.rs:77:9:\ncalled `Result::unwrap()`", "KVD199"),
        ("thread '<unnamed>' panicked at 'index out of bounds: the index is 7', src/pool.rs:7:9", "KVD199"),
    ],
)  # fmt: skip
def test_what_native_code_prints_is_read(text: str, code: str) -> None:
    assert codes(diagnose(f"{text}\n"))[:1] == [code]
    assert codes(diagnose(f"{WORKS}{text}\n(APIServer pid=7) INFO any\n"))[:1] == [code]


@pytest.mark.parametrize("note", ["note: run with `RUST_BACKTRACE=1` environment variable", "stack backtrace:"])
def test_the_message_of_a_panic_stands_below_it(note: str) -> None:
    panic = "thread 'kvbm 7' panicked at lib/llm/src/offload.rs:247:17:\n"
    log = diagnose(f"{panic}slot 7 is not there\n{note}\nERROR another\n")
    assert log.findings[0].sentence.endswith("offload.rs:247:17: slot 7 is not there")
    assert [line.number for line in scanned(f"{panic}slot 7\n{note}\nERROR another\n".encode())] == [1, 4]
    assert codes(diagnose(f"{panic}{note}\n")) == ["KVD199"]


def test_the_words_of_a_c_exception_are_the_failure() -> None:
    log = diagnose("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no slot 7\n")
    assert log.findings[0].sentence == "RuntimeError: no slot 7"
