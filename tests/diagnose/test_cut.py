"""What people paste of a failure when they do not paste all of it: a message, an exception, or frames alone."""

from __future__ import annotations

import pytest

from tests.diagnose.lines import NEWEST, codes, diagnose, logged, stats
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
    ("pasted", "code"),
    [
        (CARDS, "KVD1056"),
        (f"it says `{CARDS}`, on one node of two", "KVD1056"),
        ("[Bug]: Transfer slice failed with status: 503900", "KVD1066"),
        (
            "Failed to initialize/re-establish remote connection: 'NoneType' object cannot be interpreted as an "
            "integer (remote_backend.py:129:lmcache.v1.storage_backend.remote_backend)",
            "KVD960",
        ),
        # What a store's own statement quotes decides, as it does behind a logger's frame.
        ("Failed to initialize/re-establish remote connection: Error 111 connecting to r:6379. Refused.", "KVD1042"),
    ],
)  # fmt: skip
def test_a_message_without_its_frame_is_known_but_not_certain(pasted: str, code: str) -> None:
    log = diagnose(f"{pasted}\n")
    assert codes(log) == [code]
    assert log.findings[0].verdict == "unknown"


@pytest.mark.parametrize(
    "line",
    [
        f"INFO 12-03 01:24:31 [any.py:7] {CARDS}",
        f"I1213 02:57:10.528410 5811 worker_pool.cpp:274] {CARDS}",
        f"[EVENT] HCCL(471,):2026-05-16-03:10:19.924.639 [x.cc:61] {CARDS}",
        "a transfer failed, and then another one, with a status",
    ],
)
def test_a_line_at_info_is_no_message_of_a_failure(line: str) -> None:
    assert codes(diagnose(f"{line}\n")) == []


def test_a_message_alone_is_looked_at_only_where_nothing_else_is_known() -> None:
    """Another line says what it is, with its frame."""
    known = "ImportError: ascend_transport.so: cannot open shared object file: No such file or directory"
    assert codes(diagnose(f"{known}\n{CARDS}\n")) == ["KVD730"]


@pytest.mark.parametrize(
    ("pasted", "code"),
    [
        ("    assert isinstance(token_ids, torch.Tensor)\nAssertionError", "KVD809"),
        ("ValueError: Size mismatch: memory_obj nbytes=3942656, gpu_buffer nbytes=15495168", "KVD944"),
        ("IndexError: list index out of range\n  at mooncake_connector.py:3715 _get_remote_rank", "KVD546"),
        ("it dies of `IndexError: list index out of range` in `_get_kv_split_metadata`", "KVD545"),
        ("EngineCore dies of `assert curr_block is not None` in FreeKVCacheBlockQueue.popleft_n", "KVD635"),
        ("ERROR 03-20 02:45:15 engine.py:244] nixlUnknownError('NIXL_ERR_UNKNOWN')", "KVD373"),
        # Many lists have an end.
        ("IndexError: list index out of range", "KVD199"),
        # CUDA says it to any code.
        ("RuntimeError: CUDA error: invalid device ordinal", "KVD242"),
    ],
)
def test_an_exception_without_its_frames(pasted: str, code: str) -> None:
    assert codes(diagnose(f"{pasted}\n")) == [code]


def test_frames_without_their_exception_are_known_by_the_innermost() -> None:
    log = diagnose("".join(f"{CORE}{line}\n" for line in FOLDER))
    assert codes(log) == ["KVD698"]
    assert log.findings[0].verdict == "unknown"


def test_a_code_of_nixl_without_its_class_is_its_exception() -> None:
    """The last frame that is left is the hook, and the line below it what NIXL says."""
    file = "/opt/vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py"
    frame = f'  File "{file}", line 7, in get_finished\n    done = self._pop_done_transfers(self._recving_transfers)\n'
    for said, code in (("REMOTE_DISCONNECT", "KVD572"), ("BACKEND", "KVD373")):
        assert codes(diagnose(f"{frame}NIXL_ERR_{said}\n")) == [code]


def test_a_start_that_ends_behind_the_controllers_worker_lacks_ports() -> None:
    """Rank 0 has the only port of the list; of another rank's traceback only the exception is there."""
    joins = logged(NEWEST, "joins_controller", "('one', 0)")
    error = f"{CORE}IndexError: list index out of range\n"
    log = diagnose(joins, error)
    assert codes(log) == ["KVD1128"]
    assert log.findings[0].verdict == "unknown"
    assert codes(diagnose(joins, stats(), error)) == ["KVD1128"]
    assert codes(diagnose(joins, f"{CORE}IndexError: pop from empty list\n")) == ["KVD199"]


def test_a_compiler_that_refuses_torchs_headers() -> None:
    place = "/opt/torch/include/ATen/core/List_inl.h:202:52"
    said = "need \u2018typename\u2019 before \u2018decltype (((c10::List<T>*)this)->impl_->list)::difference_type\u2019"
    assert codes(diagnose(f"  {place}: error: {said} because it is a dependent scope\n")) == ["KVD1852"]
    assert codes(diagnose("/opt/mine/lists.h:7:5: error: expected \u2018;\u2019 before \u2018}\u2019 token\n")) == []


def test_frames_that_end_outside_are_no_failure_beside_one_that_is_known() -> None:
    key = "E0513 10:00:00.1 7 any.cpp:7] Failed to get 6722 keys out of 6722. error_codes=[-707]. Check key existence\n"
    frame = f'{CORE}File "/opt/app/vllm/v1/engine/core.py", line 1158, in run_engine_core\n'
    assert codes(diagnose(key, frame)) == ["KVD519"]
    assert codes(diagnose(frame)) == ["KVD1148"]


def test_a_hook_fails_in_the_line_that_a_record_knows() -> None:
    """Cut before its exception, a hook of vLLM's connector hands on; the rest of a condition is its own failure."""
    file = "/opt/vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py"
    frame = f'{CORE}  File "{file}", line 174, in register_kv_caches\n'
    for source, code in (
        ("len({tensors_per_block[n][0].stride() for n in names}) == 1", "KVD135"),
        ("self.spec.register(kv_caches)", "KVD1148"),
    ):
        assert codes(diagnose(f"{frame}{CORE}    {source}\n")) == [code]


def test_a_title_names_what_a_traceback_was_cut_before() -> None:
    """The last frame that is left is an outer one, and its line of source is not what failed."""
    title = "# [Bug]: AssertionError assert self.num_blocks >= nixl_agent_meta.num_blocks\n"
    frames = [
        'File "/opt/vllm/v1/worker/gpu_worker.py", line 277, in execute_model',
        "    output = self.model_runner.execute_model(scheduler_output,",
        'File "/opt/torch/utils/_contextlib.py", line 116, in decorate',
    ]
    text = "".join(f"{CORE}{line}\n" for line in frames)
    assert codes(diagnose(title, text)) == ["KVD578"]
    assert codes(diagnose("# [Bug]: it does not start\n", text)) == ["KVD1148"]


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
        '  File "/opt/app/vllm_ascend/distributed/mooncake_connector.py", line 7, in _get_kv_split_metadata',
        "IndexError: list index out of range",
    )
    log = diagnose("".join(f"{head}{line}\n" for line in trace))
    assert codes(log) == ["KVD545"]
    assert log.findings[0].evidence[0].text == "IndexError: list index out of range"


def test_a_package_that_is_too_old_explains_what_was_not_loaded() -> None:
    missing = (
        "[2026-11-21 01:41:27,007] LMCache ERROR: batch_get_buffer failed: 'mooncake.store.MooncakeDistributedStore' "
        "object has no attribute 'batch_get_buffer' (a.py:7:lmcache.a)\n"
    )
    short = (
        "[2026-11-21 01:41:27,008] LMCache ERROR: Num retrieved tokens: 0, num expected tokens: 15 (a.py:7:lmcache.a)\n"
    )
    unread = logged(NEWEST, "unretrievable")
    assert codes(diagnose(short)) == ["KVD302"]
    assert codes(diagnose(unread, short)) == ["KVD1090"]
    assert codes(diagnose(missing, short)) == ["KVD889"]
    assert codes(diagnose(missing, unread, short)) == ["KVD889"]


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


def test_ucx_that_counts_too_many_transports() -> None:
    line = (
        "[1575912043.382737] [node:7:0] ucp_context.c:1004 UCX  ERROR exceeded transports/devices limit (70 requested\n"
    )
    assert codes(diagnose(line)) == ["KVD687"]


def test_a_worker_that_ended_by_a_signal() -> None:
    assert codes(diagnose("Worker process terminated unexpectedly with signal 11\n")) == ["KVD383"]


def test_what_another_traceback_of_the_paste_called_names_the_failure() -> None:
    """vLLM's V0 engine logs the exception first, as repr has it, and then the traceback, which was cut."""
    head = "ERROR 03-20 02:45:15 engine.py:244] "
    lines = (
        "nixlUnknownError('NIXL_ERR_UNKNOWN')",
        "Traceback (most recent call last):",
        '  File "/opt/app/vllm/engine/multiprocessing/engine.py", line 343, in handle_new_input',
        "    self.engine.add_remote_nixl_metadata(nixl_metadata)",
    )
    assert codes(diagnose("".join(f"{head}{line}\n" for line in lines))) == ["KVD554"]


@pytest.mark.parametrize("error", ["IndexError: index out of range", "OSError: [Errno 22] Invalid argument"])
def test_what_python_says_of_any_code_is_of_none_without_its_frames(error: str) -> None:
    """Records have these texts of one function each; without it the failure may be anybody's."""
    assert codes(diagnose(f"{CORE}    call()\n{CORE}{error}\n")) == ["KVD199"]
    of_a_file = diagnose(f"`{error}` in `shared_offload_region.py`\n")
    assert codes(of_a_file) == (["KVD626"] if "22" in error else ["KVD355"])


def test_frames_of_the_api_server_do_not_tell_what_its_engine_met() -> None:
    """It waits for its engines there; that their ports are taken is one of many reasons."""
    frames = [
        'File "/opt/vllm/v1/engine/core_client.py", line 7, in __init__',
        "    with launch_core_engines(vllm_config,",
    ]
    assert codes(diagnose("".join(f"{CORE}{line}\n" for line in frames))) == ["KVD1148"]


def test_code_that_is_quoted_has_not_failed() -> None:
    """The title names the assertion's function; the piece of source around it has other signs."""
    text = (
        "_update_from_kv_xfer_finished AssertionError kills EngineCore\n```python\nassert req_id in self.requests\n"
        "if req.status != WAITING:\n    assert RequestStatus.is_finished(req.status)\n"
        "    self._free_blocks(self.requests[req_id])\n```\n"
    )
    assert codes(diagnose(text)) == ["KVD109"]


def test_an_assertion_is_known_by_the_names_that_a_text_gives() -> None:
    """`wait_for_save` has several assertions without a text; the names are those of one."""
    text = "LMCache 0.3.10: AssertionError in `wait_for_save()`: {} has another length than `token_ids`\n"
    assert codes(diagnose(text.format("`slot_mapping`"))) == ["KVD112"]
    assert codes(diagnose(text.format("a list"))) == ["KVD129"]
    assert "KVD112" not in codes(diagnose(text.format("`slot_mapping`").replace("wait_for_save", "save")))
    assert "KVD112" not in codes(diagnose(text.format("`slot_mapping`").replace("AssertionError", "KeyError")))


def test_a_title_counts_above_lines_that_say_nothing() -> None:
    lines = "I0924 06:55:08.151127   204 client_metric.cpp:76] Client metrics enabled (default enabled)\n" + stats(
        1, 0, 9.0
    )
    title = "# [Bug]: Failed to submit all transfers, error code is NotSupportedTransport\n"
    assert codes(diagnose(title, lines)) == ["KVD1194"]
    assert codes(diagnose("# [Bug]: it is slow\n", lines)) == []
    assert codes(diagnose(lines)) == []


def test_what_was_in_a_step_is_no_failure() -> None:
    """vLLM dumps the scheduler's statistics as an error; their names have words of failures."""
    dump = "Dumping scheduler stats: SchedulerStats(num_running_reqs=1, num_corrupted_reqs=0)"
    line = f"(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [dump_input.py:79] {dump}\n"
    frame = f'{CORE}File "/opt/app/vllm/v1/engine/core.py", line 267, in step\n'
    assert codes(diagnose(line)) == []
    assert codes(diagnose(line, frame)) == ["KVD1148"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("WARNING 09-16 13:18:12 [gpu_worker.py:208] cudaHostRegister failed for rank=0", "KVD628"),
        ("WARNING 09-16 13:18:12 [gpu_worker.py:208] cudaHostRegister failed for ra", "KVD628"),
        ("cuMemcpyBatchAsync failed at index 1 wi", "KVD621"),
        # Other processes end by a signal too: this beginning is of several records.
        ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc", "KVD1041"),
        ("WARNING 09-16 13:18:12 [gpu_worker.py:208] cudaHostReg", ""),
    ],
)
def test_a_paste_that_ends_within_a_message(line: str, code: str) -> None:
    log = diagnose(line)
    assert codes(log) == [code] * bool(code)
    assert all(found.verdict == "unknown" for found in log.findings)


CUT = f'{CORE}  File "/opt/app/vllm/v1/engine/core.py", line 1158, in run_engine_core\n'


def test_what_the_title_names_explains_a_traceback_that_was_cut() -> None:
    title = "[Bug]: it dies of a KeyError in self._block_id_to_pending_jobs[bid]\n"
    assert codes(diagnose(title, CUT)) == ["KVD800"]


def test_the_head_of_a_handlers_error_is_its_finding_alone() -> None:
    head = "[2026-02-23 16:08:35,513] LMCache ERROR: Error handling request RequestType.LOOKUP (mq.py:7:lmcache.mq)\n"
    assert codes(diagnose(head)) == ["KVD212"]


def test_an_exception_of_the_title_explains_a_traceback_that_was_cut() -> None:
    title = "[Bug]: AssertionError: External KV connector is not verified yet\n"
    assert codes(diagnose(title, CUT)) == ["KVD653"]
    assert codes(diagnose("[Bug]: RuntimeError: it is broken\n", CUT)) == ["KVD199"]


@pytest.mark.parametrize("cut", ["", CUT])
def test_an_assertion_of_a_function_that_the_title_names(cut: str) -> None:
    """One record asserts there; where several do, none is it."""
    title = "# OffloadingConnector: AssertionError in {} under load\n"
    assert codes(diagnose(title.format("_build_store_jobs"), cut)) == ["KVD601"]
    assert "KVD601" not in codes(diagnose(title.format("_build_load_jobs"), cut))
    assert "KVD601" not in codes(diagnose(title.format("_build_store_jobs").replace("AssertionError", "slow"), cut))
