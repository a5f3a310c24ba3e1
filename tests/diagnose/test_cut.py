"""What people paste of a failure when they do not paste all of it: a message, an exception, or frames alone."""

from __future__ import annotations

import pytest

from tests.diagnose.lines import NEWEST, codes, diagnose, logged
from tests.diagnose.releases import CORE

CARDS = (
    "Worker: Process failed for slice (opcode: 1, source_addr: 0x7f, length: 65536, dest_addr: 0x7e, "
    "local_nic: mlx5_7, peer_nic: 10.0.0.7:14127@mlx5_4, dest_rkey: 7, retry_cnt: 0): transport retry counter exceeded"
)
FOLDER = (
    'File "/opt/app/lmcache/v1/storage_backend/local_disk_backend.py", line 124, in __init__',
    "  os.makedirs(self.path)",
)


@pytest.mark.parametrize(
    "head",
    [
        "(Worker pid=7) ERROR 2026-01-12 16:28:02.921 [multiproc_executor.py:824] ",
        "(Worker pid=7) ERROR 01-12 16:28:02 [[multiproc_executor.py:824](http://multiproc_executor.py:824/)] ",
    ],
)
def test_a_frame_of_another_date_or_with_a_link_is_vllms(head: str) -> None:
    """The place of the statement is read, and what comes behind it is the exception."""
    trace = (
        "Traceback (most recent call last):",
        '  File "/opt/app/lmcache/v1/storage_backend/pd_backend.py", line 7, in from_cache_engine_config',
        "IndexError: list index out of range",
    )
    log = diagnose("".join(f"{head}{line}\n" for line in trace))
    assert codes(log) == ["KVD526"]
    assert log.findings[0].evidence[0].text == "IndexError: list index out of range"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("KVD888", "ERROR: batch_get_into failed for key m@1@0@77 (code=-704)"),
        ("KVD847", "WARNING: Failed to allocate memory during remote receive"),
        ("KVD872", "WARNING: Key exists but KV cache does not exist.Might happen when the cache is evicted by redis"),
    ],
)
def test_what_the_store_itself_says_is_why_it_does_not_give(code: str, error: str) -> None:
    line = f"[2026-11-21 01:41:27,007] LMCache {error} (a.py:7:lmcache.a)\n"
    log = diagnose(line, logged(NEWEST, "unretrievable"), logged(NEWEST, "short", 0, 15))
    assert codes(log) == [code]


def test_a_worker_that_ended_by_a_signal() -> None:
    assert codes(diagnose("Worker process terminated unexpectedly with signal 11\n")) == ["KVD383"]


def test_frames_of_the_api_server_do_not_tell_what_its_engine_met() -> None:
    """It waits for its engines there; that their ports are taken is one of many reasons."""
    frames = [
        'File "/opt/vllm/v1/engine/core_client.py", line 7, in __init__',
        "    with launch_core_engines(vllm_config,",
    ]
    assert codes(diagnose("".join(f"{CORE}{line}\n" for line in frames))) == ["KVD1148"]


def test_what_was_in_a_step_is_no_failure() -> None:
    """vLLM dumps the scheduler's statistics as an error; their names have words of failures."""
    dump = "Dumping scheduler stats: SchedulerStats(num_running_reqs=1, num_corrupted_reqs=0)"
    line = f"(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [dump_input.py:79] {dump}\n"
    frame = f'{CORE}File "/opt/app/vllm/v1/engine/core.py", line 267, in step\n'
    assert codes(diagnose(line)) == []
    assert codes(diagnose(line, frame)) == ["KVD1148"]


CUT = f'{CORE}  File "/opt/app/vllm/v1/engine/core.py", line 1158, in run_engine_core\n'


def test_the_head_of_a_handlers_error_is_its_finding_alone() -> None:
    head = "[2026-02-23 16:08:35,513] LMCache ERROR: Error handling request RequestType.LOOKUP (mq.py:7:lmcache.mq)\n"
    assert codes(diagnose(head)) == ["KVD212"]
