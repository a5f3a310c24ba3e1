"""Read compressed, split, damaged and random logs. KVFIX_TEST_EXAMPLES sets the number of damaged and random logs."""

import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfix_tools.diagnose import log_files, report_json
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from kvfix_tools.diagnose.line_scanner import LONGEST_LINE
from tests.diagnose import mutate
from tests.diagnose.lines import diagnose_files, real, scanned

EXAMPLES = int(os.environ.get("KVFIX_TEST_EXAMPLES", "300"))
POLL = (
    b"\x1b[32;20m[2026-11-21 01:41:27,%03d] LMCache INFO:\x1b[0m Reqid: r%d, Total tokens 900, Inference Engine "
    b"computed tokens: 0, LMCache hit tokens: 256, need to load: 256 "
    b"\x1b[3m(vllm_v1_adapter.py:1476:lmcache.integration.vllm.vllm_v1_adapter)\x1b[0m\n"
)


def polls(many: int, start: int = 0) -> bytes:
    return b"".join(POLL % (n % 1000, start + n) for n in range(many))


def count(paths: list[str]) -> tuple[int, list[str]]:
    log = Diagnosis()
    unreadable = log_files.read(log, log_files.sources(paths))
    return log.counts["asked"], unreadable


def test_plain_gzip_zstd_and_folders(tmp_path: Path) -> None:
    log = polls(300)
    (tmp_path / "a.log").write_bytes(log)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.log.gz").write_bytes(gzip.compress(log))
    (tmp_path / "model.json").write_bytes(log)
    assert count([str(tmp_path)]) == (600, [])
    zstandard = pytest.importorskip("zstandard", reason="zstandard (kvfix[zstd]) is not installed")
    (tmp_path / "c.log.zst").write_bytes(zstandard.compress(log))
    assert count([str(tmp_path / "c.log.zst")]) == (300, [])
    assert count([str(tmp_path)]) == (900, [])


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(log_files.Refused, match="no log files"):
        log_files.sources([str(tmp_path)])
    with pytest.raises(log_files.Refused, match=r"nothing\.log: No such file"):
        log_files.sources([str(tmp_path / "nothing.log")])
    packed = gzip.compress(polls(2000))
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    _, unreadable = count([str(tmp_path / "cut.gz")])
    assert len(unreadable) == 1
    assert "damaged" in unreadable[0]
    (tmp_path / "no.gz").write_bytes(b"not packed at all")
    assert "damaged" in count([str(tmp_path / "no.gz")])[1][0]


def test_blocks_end_with_lines_and_lose_nothing() -> None:
    log = polls(20_000) + b"no end of line"
    blocks = list(log_files.blocks(log_files.Source("log", len(log)), io.BytesIO(log)))
    assert len(blocks) > 2
    assert b"".join(blocks) == log
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_a_log_in_blocks_is_diagnosed_as_one_in_memory(tmp_path: Path) -> None:
    text = polls(3000) + real("crash-0.3.10") + polls(1) * 10
    path = tmp_path / "log"
    path.write_bytes(text)
    log, whole = diagnose_files(path), diagnosed(text, str(path))
    assert report_json.text(log, log.findings) == report_json.text(whole, whole.findings)
    assert '"KVD101"' in report_json.text(log, log.findings)
    assert [event.line for event in log.requests.history("r2999")] == [3000]
    assert len(list(log_files.blocks(log_files.Source("log", None), io.BytesIO(text)))) > 2


@pytest.mark.parametrize(
    "what",
    [b"\x00" * 1000, b"\xff\xfe\x80", b"\r\n\r\n", b"\x1b[31m", bytes(range(256)), b"Error", b'File "x", line 99999'],
)
def test_rubbish_between_lines(what: bytes) -> None:
    log = b"".join(POLL % (n, n) + what + b"\n" for n in range(50))
    assert sum(line.name == "asked" for line in scanned(log)) == 50


def test_a_line_of_100_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(polls(10) + b"x" * (100 << 20) + b"\n" + polls(10, 10))
    tracemalloc.start()
    asked, _ = count([str(path)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert asked == 20
    assert peak < 40 << 20


@pytest.mark.parametrize(
    "piece", [b"] LMCache INFO: ", b"(EngineCore pid=", b'File "', b"  AssertionError", b"Reqid: a, "]
)
def test_one_piece_many_times_over(piece: bytes) -> None:
    assert diagnosed(piece * (LONGEST_LINE // len(piece)) + b" Error\n" + polls(1)).counts["asked"] == 1


def test_numbers_without_end() -> None:
    """int() raises for more than 4300 digits. `diagnosed` must accept logs with longer numbers."""
    nines = b"9" * 5000
    lines = [
        (POLL % (0, 1)).replace(b"900", nines).replace(b"256", nines),
        b"INFO 12-03 01:24:36 [core.py:7] Initializing a V1 LLM engine (v0." + nines + b") with config\n",
        POLL.replace(b"1476", nines) % (0, 2),
        (POLL % (0, 3)).replace(b"2026", nines),
        b'  File "x.py", line ' + nines + b", in f\n",
        b"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: "
        + nines + b" reqs, Waiting: 1 reqs\n",
        b"Engine 000: Avg prompt throughput: 0.0.0 tokens/s, Avg generation throughput: . tokens/s, Running: 1 reqs, "
        b"Waiting: 1 reqs\n",
    ]  # fmt: skip
    for line in lines:
        diagnosed(line)


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    early, late = POLL.replace(b"01:41:27", b"01:41:00"), POLL.replace(b"01:41:27", b"01:42:00")
    (tmp_path / "a").write_bytes(early % (0, 1) + late % (0, 1))
    (tmp_path / "b").write_bytes(POLL % (0, 1))
    log = Diagnosis(request="r1")
    log_files.read(log, log_files.sources([str(tmp_path)]))
    assert [f"{Path(line.file).name}:{line.line}" for line in log.request_lines] == ["a:1", "b:1", "a:2"]


def test_the_first_logs_of_the_corpus() -> None:
    found = [code for number in range(EXAMPLES * 2) for code in mutate.check(mutate.draw(number), 1 << 12)]
    assert {"KVD101", "KVD203", "KVD206"} <= set(found)


@given(log=st.binary(max_size=4000))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_any_bytes_at_all(log: bytes) -> None:
    diagnosed(log)
