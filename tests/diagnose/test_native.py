"""What native code prints, and tracebacks in rich's boxes: read, and told with the words that say why."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.traceback import Traceback

from tests.diagnose import damage
from tests.diagnose.lines import codes, diagnose, scanned, stats

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
        ("node7:99:1234 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<42345> failed : "
         "Connection refused", "KVD222"),
        ("RuntimeError: NCCL Error 5: invalid usage (run with NCCL_DEBUG=WARN for details)", "KVD243"),
        ("thread 'main' panicked at lib/bindings/kvbm/src/blocks.rs:77:9:\ncalled `Result::unwrap()`", "KVD199"),
        ("thread '<unnamed>' panicked at 'index out of bounds: the index is 7', src/pool.rs:7:9", "KVD199"),
    ],
)  # fmt: skip
def test_what_native_code_prints_is_read(text: str, code: str) -> None:
    assert codes(diagnose(f"{text}\n"))[:1] == [code]
    assert codes(diagnose(f"{WORKS}{text}\n(APIServer pid=7) INFO any\n"))[:1] == [code]


def test_a_flood_of_warnings_about_kv_is_noticed_whoever_logs_them() -> None:
    """An engine at work, whose scheduler says again and again that a transfer failed; and one that says it once."""
    work = stats(running=1, generation=5.0)
    lost = "(EngineCore pid=7) WARNING 12-03 01:24:36 [scheduler.py:7] finished_recving of {}: failed, not known\n"
    assert codes(diagnose(*[work + lost.format(number) for number in range(60)])) == ["KVD198"]
    assert codes(diagnose(work, lost.format(7), work)) == []
    other = lost.replace("finished_recving", "the tokenizer")
    assert codes(diagnose(*[work + other.format(number) for number in range(60)])) == []


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


def popleft_n(self: object, number: int) -> None:
    curr_block = None
    assert curr_block is not None, "no block in this list, and a text that is wider than some of the terminals " * 2


def boxed(width: int, show_locals: bool) -> str:
    out = io.StringIO()
    with pytest.raises(AssertionError) as raised:
        popleft_n(None, 7)
    made = Traceback.from_exception(raised.type, raised.value, raised.tb, show_locals=show_locals, width=width)
    Console(width=width, file=out).print(made)
    return out.getvalue()


@pytest.mark.parametrize("show_locals", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_traceback_in_a_box_of_rich(width: int, show_locals: bool) -> None:
    (line,) = scanned(boxed(width, show_locals).encode())
    assert line.fields["class"] == "AssertionError"
    assert line.fields["text"].endswith("some of the terminals")
    assert line.fields["frames"][-1][2] == "popleft_n"
    assert line.fields["frames"][-1][0].endswith("tests/diagnose/test_native.py")
    assert line.fields["source"].startswith("assert curr_block is not None, ")
    assert codes(diagnose(boxed(width, show_locals))) == ["KVD635"]


def test_a_box_without_its_signs_and_its_end() -> None:
    plain = str.maketrans("╭╮╰╯─│❱", "++++-|>")
    assert codes(diagnose(boxed(80, True).translate(plain))) == ["KVD635"]
    cut = boxed(80, False).partition("╰")[0]
    assert [line.fields["frames"][-1][2] for line in scanned(cut.encode())] == ["popleft_n"]
    between = f"INFO before\n{boxed(80, False)}\nINFO behind\n"
    assert [line.fields["class"] for line in scanned(between.encode())] == ["AssertionError"]


@pytest.mark.parametrize("before", ["[rank0]: ", "vllm-1  | ", "2026-11-21T10:22:55.123456789Z stderr F ", "   "])
def test_a_box_behind_what_a_launcher_puts_first(before: str) -> None:
    rows = "".join(f"{before}{line}\n" for line in boxed(100, True).splitlines())
    assert codes(diagnose(rows)) == ["KVD635"]


def test_a_box_with_lines_of_others_in_it() -> None:
    rows = [each for line in boxed(100, False).splitlines() for each in (line, WORKS.strip())]
    (line,) = scanned("\n".join(rows).encode())
    assert line.fields["frames"][-1][2] == "popleft_n"
    assert codes(diagnose("\n".join(rows))) == ["KVD635"]


def test_what_follows_a_box_that_was_cut_is_read() -> None:
    cut = boxed(80, False).partition("popleft_n")[0]
    group = "  + Exception Group Traceback (most recent call last):\n"
    member = (
        '  | Traceback (most recent call last):\n  |   File "/opt/any.py", line 7, in any\n  | LookupError: no slot 7\n'
    )
    assert "no slot 7" in diagnose(f"{cut}\n{group}{member}").findings[0].sentence


#: Damages that leave all of a record's own words there.
WHOLE = ("wrapped at 80", "wrapped at 100", "wrapped at 120", "quoted", "mixed with another process", "boxed by rich")


@pytest.mark.parametrize("name", damage.DAMAGES)
def test_damage_seldom_hides_a_record_and_never_makes_it_another(name: str) -> None:
    """Of a part of the records; `python -m tests.diagnose.damage` has all of them."""
    verdicts = [each.verdict for each in damage.results(name, 23)]
    # What is cut off may be the error that a statement quotes: then the statement's own record is the finding.
    assert verdicts.count("wrong") <= (0.03 if name == "cut at 120" else 0.01) * len(verdicts)
    if name in WHOLE:
        assert verdicts.count("right") > 0.97 * len(verdicts)
