"""Pasted stacks of a hung engine from `py-spy dump`: the waiting process and its function are found."""

from __future__ import annotations

import pytest

from kvfix_tools.diagnose.diagnosis import diagnosed

#: The shape is py-spy's own; functions and lines are those of LMCache 0.5.6 and vLLM 0.32.0.
DUMP = b"""\
Process 4242: VLLM::EngineCore
Python v3.12.3 (/usr/bin/python3.12)

Thread 4242 (idle): "MainThread"
    poll (zmq/sugar/socket.py:1030)
    lookup (lmcache/v1/lookup_client/lmcache_lookup_client.py:210)
    get_num_new_matched_tokens (lmcache/integration/vllm/vllm_v1_adapter.py:1440)
    get_num_new_matched_tokens (vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py:240)
    schedule (vllm/v1/core/sched/scheduler.py:900)
    run_busy_loop (vllm/v1/engine/core.py:1500)
Thread 4260 (idle): "Thread-2 (process_input_sockets)"
    select (selectors.py:468)
    process_input_sockets (vllm/v1/engine/core.py:1700)
"""


def test_a_thread_in_a_hook_is_found() -> None:
    log = diagnosed(DUMP)
    assert [found.rule.code for found in log.findings] == ["KVD213"]
    sentence = log.findings[0].sentence
    assert "VLLM::EngineCore pid=4242 is in get_num_new_matched_tokens" in sentence
    assert "idle in poll (sugar/socket.py:1030)" in sentence
    assert log.findings[0].verdict == "unknown"


#: The shape is gdb's (`thread apply all bt`); the functions are NIXL's, UCX's and libc's.
NATIVE = b"""\
Thread 12 (Thread 0x7f1234 (LWP 77) "VLLM::Worker"):
#0  0x00007f12345678 in pthread_cond_wait@@GLIBC_2.3.2 () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f12345679 in nixlAgent::getXferStatus (this=0x55, req=0x66) from /x/nixl.libs/libnixl-77.so
#2  0x00007f1234567a in uct_ib_mlx5_poll (x=1) at ib_mlx5.c:77
"""


@pytest.mark.parametrize("dump", [NATIVE, NATIVE.partition(b"\n")[2], b"[Switching to thread 7]\n(gdb) bt\n" + NATIVE])
def test_a_thread_of_gdb_in_a_transport_is_found(dump: bytes) -> None:
    (found,) = diagnosed(dump).findings
    assert found.rule.code == "KVD1303"
    assert found.sentence.endswith(
        "is in pthread_cond_wait@@GLIBC_2.3.2, called from nixlAgent::getXferStatus (libnixl-77.so)"
    )
    assert found.verdict == "unknown"


def test_threads_of_gdb_that_only_wait_for_work_are_no_finding() -> None:
    for idle in (NATIVE.replace(b"nixlAgent::getXferStatus", b"nixlUcxThread::progressFunc"),
                 b'Thread 7 (LWP 99 "python3"):\n#0  0x00007f in epoll_wait () from /lib/libc.so.6\n'):  # fmt: skip
        assert [found.rule.code for found in diagnosed(idle).findings] == []


def test_a_crash_is_told_before_its_stack() -> None:
    """gdb's own line names the signal."""
    died = b'Thread 1 "VLLM::EngineCor" received signal SIGSEGV, Segmentation fault.\n'
    assert [found.rule.code for found in diagnosed(died + NATIVE).findings] == ["KVD383"]
