"""Stacks that `py-spy dump` printed of a hung engine, as they are pasted: who waits, and where."""

from __future__ import annotations

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


def test_an_idle_engine_is_no_finding() -> None:
    idle = DUMP.replace(b"get_num_new_matched_tokens", b"step").replace(b"lookup (", b"get (")
    assert [found.rule.code for found in diagnosed(idle).findings] == []
