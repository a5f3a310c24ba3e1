"""Lines that only a few words tell apart, cases from reports, and what of a line a record needs."""

import re

import pytest

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.signs import PLACE
from tests.diagnose.finding_logs import ADAPTER, STARTS, hits
from tests.diagnose.lines import (
    CORE,
    LMCACHE,
    NEWEST,
    VLLM,
    asked,
    codes,
    diagnose,
    logged,
    raised,
    site_packages,
    version,
)

#: LMCache prints a CacheEngineKey, here with a model that lies below a long path.
KEY = f"CacheEngineKey(model_name='/data/{'models/' * 30}', world_size=1, worker_id=0, request_configs=None)"
TCP = (
    "E0612 14:05:26.176716 1192408 tcp_transport.cpp:136] Session::writeBody failed. {}, total_transferred_bytes_: 0\n"
)
BAD_ADDRESS = "Error: Bad address (value: 14)"
LIBRARY = "libcudart.so.13: cannot open shared object file: No such file or directory"
NO_KEY = "unsupported format string passed to bytes.__format__"
#: CUDA does not have the GPU that this code chooses.
NO_GPU = (
    'Traceback (most recent call last):\n  File "/opt/app/{}", line 7, in {}\n    torch.cuda.set_device(rank)\n'
    "RuntimeError: CUDA error: invalid device ordinal\n"
)
QUOTED = f"{CORE}RuntimeError: Worker failed with error '{{}}', please check the stack trace above for the root cause\n"
DEAD = "(APIServer pid=7) ERROR 11-21 01:42:28 [async_llm.py:525] AsyncLLM output_handler failed.\n"
#: Without a release in the log. Releases from 0.5.5 on report a failed load.
FAILED = "LMCache ERROR: Something went wrong when processing the retrieve request for request_id=r1, result=False\n"
FAILING = (
    "ERROR 09-20 10:00:00 [scheduler.py:3043] Failing 1 request(s) due to KV load failure (failure_policy=fail, "
    "6144 tokens affected)\n"
)


UNHEALTHY = "LMCache server is unhealthy — entering degraded mode"
TRANSFER = [("lmcache/v1/multiprocess/server.py", "store", "lmc_ops.multi_layer_block_kv_transfer(")]
NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/"
POSTS = ("nixl_cu12/_api.py", "transfer", "self.agent.postXferReq(handle, b'')")
BACKEND = "nixl_cu12._bindings.nixlBackendError: NIXL_ERR_BACKEND"
RETRIEVE = (
    "Traceback (most recent call last):\n"
    '  File "/opt/app/lmcache/v1/multiprocess/modules/lmcache_driven_transfer.py", line 600, in retrieve\n'
    "    self.context(instance)\n"
    "ValueError: {}\n"
)
PORTS = raised(
    [("lmcache/v1/storage_backend/pd_backend.py", "from_cache_engine_config", "ports[rank]")],
    "IndexError: list index out of range",
)
MISSED = logged(NEWEST, "unretrievable") + logged(NEWEST, "short", 0, 15)
DUMPED = (
    "(EngineCore_DP0 pid=276) ERROR 12-03 01:24:36 [dump_input.py:79] Dumping scheduler stats: "
    "SchedulerStats(num_running_reqs=1, num_corrupted_reqs=0)\n"
)
INSTALL = (
    '(EngineCore pid=9) Traceback (most recent call last):\n(EngineCore pid=9)   File "/opt/any.py", line 7, in f\n'
    "(EngineCore pid=9) ImportError: Please install mooncake by following the instructions at "
    "https://any.org/build.md to run "
)
PULLING = VLLM.format(level="ERROR", text="pulling kv_caches for ['7'] failed: {}")


GRANTED = asked(NEWEST, 3000, 0, 2048, 2048)
CAPPED = logged(NEWEST, "capped", "cmpl-1", 2048, 1024, 1024)
ENDS = "(EngineCore pid=7) INFO 12-03 01:24:36 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
UNKNOWN = hits()["KVD199"][0]
RAN = version(NEWEST) + "(EngineCore pid=7) INFO 12-03 01:24:01 [core.py:1] x\n"
RETRIEVED = (
    "(RayWorkerProc pid=9) [2026-12-03 01:24:{},252] LMCache INFO: [req_id=r] Retrieved 256 out of 256 "
    "required tokens (from 256 total tokens). size: 0.0002 gb, cost 39.6141 ms, throughput: 0.0062 GB/s; "
    "(cache_engine.py:1012:lmcache.v1.cache_engine)\n"
)
SIGTERM = (
    "(MainProcess pid=7) INFO 12-03 01:24:36 [utils.py:628] [shutdown] Process manager: send sigterm to process "
    "EngineCore\n"
)
EXITS = (
    "(MainProcess pid=7) WARNING 12-03 01:24:40 [core_client.py:817] [shutdown] MPClient: engine core exited "
    "unexpectedly; starting cleanup\n"
)


def error(text: str, level: str = "ERROR") -> str:
    return LMCACHE.format(level=level, text=text)


def manager(reason: str) -> str:
    text = f"Failed to initialize LMCacheManager components: {reason}. System will operate in degraded mode"
    return error(f"{text} (recompute).")


def init_failed(reason: str) -> str:
    return error(f"LMCacheEngine marked as init failed: {reason}")


STORE_FAILED = error("Cannot store keys due to exception")
NO_INTEGER = error(
    "Failed to initialize/re-establish remote connection: 'NoneType' object cannot be interpreted as an integer"
)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (error(f"Put task failed for key {KEY}: [Errno 32] Broken pipe"), "KVD866"),
        # `Input/output error` of a socket or a card, and of a disk.
        ("[1744331142.028115] [node:2802608:3]  tcp_ep.c:1 UCX  ERROR tcp_ep 0x5: send failed: Input/output error\n",
         "KVD148"),
        (error("Failed to write /kv/7.pt: [Errno 5] Input/output error"), "KVD229"),
        # Errno 14 is of the memory; the same statement with another one is of the peer or the network.
        (TCP.format(BAD_ADDRESS), "KVD1134"),
        (TCP.format(f"Attempt to write data 0x7f using buffer 0x7f. {BAD_ADDRESS}"), "KVD1134"),
        (TCP.format("Error: Connection reset by peer (value: 104)"), "KVD224"),
        # The file that logs a refused handshake is the metadata's; what failed is the queue pair.
        ("E1216 08:39:47.366148 15997 transfer_metadata.cpp:793] Handshake request is rejected by peer endpoint "
         "127.0.0.1:8144@mlx5_0, message: Failed to modity QP to RTR, check mtu, gid, peer lid, peer qp num. Please\n",
         "KVD505"),
        # An assertion without its frames is known by its source.
        ("    assert effective_cpu_size > 0\nAssertionError\n", "KVD849"),
        ("    assert effective_cpu_size > 0\nValueError\n", "KVD199"),
        # An engine quotes the error of a worker, and the record of this error is the finding.
        (QUOTED.format("CUDA out of memory. Tried to allocate 2.00 GiB."), "KVD215"),
        # A log of echoes says where the cause stands.
        (DEAD, "KVD1041"),
        (f"{CORE}Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n{DEAD}", "KVD1040"),
        # str() of an assertion without a text (manager.py 0.4.2:110); with a reason the line says it itself.
        (manager(""), "KVD833"),
        (manager("lmcache_worker_ports: one is missing"), "KVD207"),
        # The reason is in a separate line. Alone, this line has another cause: a wheel for CUDA on ROCm.
        (error("Failed to import backend lmcache.c_ops:", "WARNING") + f"{LIBRARY}\n", "KVD831"),
        (error(f"Failed to import backend lmcache.c_ops: {LIBRARY}", "WARNING"), "KVD831"),
        (f"{LIBRARY}\n", "KVD704"),
        ("cannot import name 'LMCacheEngineMetadata' from 'lmcache.config'\n", "KVD442"),
        ("we cannot import name tags from the registry\n", ""),
        # Whatever the store: the key cannot be written (0.3.12 utils.py, to_string).
        (version("0.3.12") + error(f"batched put error: {NO_KEY}"), "KVD739"),
        (version("0.3.12") + error(f"Remote connection failed in contains: {NO_KEY}"), "KVD739"),
        # A GPU that LMCache counts otherwise; and a container with too few GPUs.
        (NO_GPU.format("lmcache/integration/vllm/vllm_v1_adapter.py", "init_lmcache_engine"), "KVD750"),
        (NO_GPU.format("vllm/v1/worker/gpu_worker.py", "init_device"), "KVD242"),
        # utils.py, parse_cache_key: 0.3.9.post1 to 0.3.13 look for the layer one part too early.
        (version("0.3.13") + "ValueError: Invalid key string: vllm@m@1@0@-5d1b@bfloat16@0\n", "KVD899"),
        (FAILED, "KVD301"),
        (FAILED + FAILING, "KVD303"),
        # A message alone on its line, in a sentence, and among lines of another text.
        (f"{UNHEALTHY}\n", "KVD204"),
        (f"We saw that {UNHEALTHY}, once.\n", ""),
        ("a line of a letter\n" * 9 + f"\n{UNHEALTHY}\n", ""),
        ("see vllm/v1/core/sched/scheduler.py, in which requests wait\n", ""),
        # The time-out of the queue is the cause of the one that is raised; neither is an unknown failure.
        (raised([("vllm/distributed/device_communicators/shm_broadcast.py", "acquire_read", "raise")], "TimeoutError")
         + f"{CORE}The above exception was the direct cause of the following exception:\n"
         + raised([("vllm/v1/executor/multiproc_executor.py", "get_response", "raise TimeoutError(")],
                  "TimeoutError: RPC call to sample_tokens timed out."), "KVD945"),
        # Lines with other numbers count as equal, but a number in a sign tells failures apart.
        (raised(TRANSFER, "RuntimeError: Unsupported GPUKVFormat: 7"), "KVD766"),
        (raised(TRANSFER, "RuntimeError: Unsupported GPUKVFormat: 10"), "KVD767"),
        (raised(TRANSFER, "RuntimeError: Unsupported GPUKVFormat: 99"), "KVD199"),
        (raised(TRANSFER, "RuntimeError: Unsupported GPUKVFormat: 6"), "KVD766"),
        # NIXL serves vLLM's connector and LMCache's storage: what failed is known by the frames above it.
        (raised([(f"{NIXL}worker.py", "_read_blocks", "wrapper.transfer(handle)"), POSTS], BACKEND), "KVD571"),
        (raised([("lmcache/v1/storage_backend/nixl_storage_backend.py", "post_blocking", "agent.transfer(handle)"),
                 POSTS], BACKEND), "KVD359"),
        (raised([("opt/store.py", "put", "agent.transfer(handle)"), POSTS], BACKEND), "KVD199"),
        # The server's handler logs that it failed, then the exception: one failure, one remedy.
        (STORE_FAILED, "KVD915"),
        (STORE_FAILED + RETRIEVE.format("No GPU context registered for instance ID 7"), "KVD920"),
        # One line, one remedy: that of the error which the line quotes, where a record knows it.
        (init_failed("Address already in use (addr='tcp://0.0.0.0:8500')"), "KVD220"),
        (init_failed("[Errno 13] Permission denied: '/data/kv'"), "KVD227"),
        (init_failed("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"), "KVD215"),
        (init_failed("pd_buffer_size (7) is smaller than a single chunk (9)"), "KVD528"),
        (init_failed("list index out of range"), "KVD527"),
        (init_failed("what nobody knows"), "KVD923"),
        # A frame of another date, or with a link, is vLLM's.
        (PORTS.replace(CORE, "(Worker pid=7) ERROR 2026-01-12 16:28:02.921 [multiproc_executor.py:824] "), "KVD526"),
        (PORTS.replace(CORE, "(Worker pid=7) ERROR 01-12 16:28:02 [[multiproc_executor.py:824](http://m.py:8/)] "),
         "KVD526"),
        # The store itself says why it does not give.
        (error("batch_get_into failed for key m@1@0@77 (code=-704)") + MISSED, "KVD888"),
        (error("Failed to allocate memory during remote receive", "WARNING") + MISSED, "KVD847"),
        (error("Key exists but KV cache does not exist.Might happen when the cache is evicted by redis", "WARNING")
         + MISSED, "KVD872"),
        # vLLM dumps the scheduler's statistics as an error; their names have words of failures.
        (DUMPED, ""),
        (f'{DUMPED}{CORE}File "/opt/app/vllm/v1/engine/core.py", line 267, in step\n', "KVD1148"),
        # The record that says more replaces those that say less of one failure.
        (raised([("vllm/distributed/device_communicators/all2all.py", "<module>", "import nixl_ep"),
                 ("nixl_ep/__init__.py", "<module>", "import nixl_ep_cpp")],
                "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"), "KVD151"),
        ("INFO 12-03 01:24:30 [core.py:69] Initializing a V1 LLM engine (v0.32.0) with config: model='m'\n"
         "(Worker pid=7) ERROR 12-03 01:24:36 [base_worker.py:1260] NIXL transfer failure: transfer_failed | "
         "Context: {}\n" + raised([(f"{NIXL}base_worker.py", "_pop_done_transfers", "check()")],
                                  "nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"),
         "KVD591"),
        # Both texts are of one loop: with this reason it is the one that failed before.
        (error("Failed to process mem alloc loop: Operation cannot be accomplished in current state"), "KVD691"),
        (error("Failed to process mem alloc loop: gone"), "KVD259"),
        # "Please install mooncake ...": vLLM's connectors and LMCache's say the same but for the last words.
        (f"{INSTALL}VLLM with MooncakeTransferEngine.\n", "KVD509"),
        (f"{INSTALL}vLLM with MooncakeStoreConnector.\n", "KVD509"),
        (f"{INSTALL}vLLM with MooncakeConnector.\n", "KVD890"),
        (PULLING.format("Timeout waiting for P side ready"), "KVD501"),
        (PULLING.format("Mooncake transfer engine returned -1"), "KVD502"),
        (PULLING.format("gone"), "KVD261"),
        # Without a lookup in its own prefix cache vLLM leaves the rate of that cache out.
        ("(APIServer pid=4153) INFO 11-28 14:18:36 [loggers.py:335] Engine 000: Avg prompt throughput: 2.4 tokens/s, "
         "Avg generation throughput: 1.2 tokens/s, Running: 0 reqs, Waiting: 1 reqs, Deferred: 1 reqs, CPU KV cache "
         "usage: 0.0%, External prefix cache hit rate: 41.8%\n", ""),
        # Loads are judged by lines at DEBUG: as much as was granted, or as much as a limit of LMCache allows.
        (GRANTED + logged(NEWEST, "due", 2048, 0, "cmpl-1"), ""),
        (GRANTED + CAPPED + logged(NEWEST, "due", 1024, 0, "cmpl-1"), ""),
        (GRANTED + logged(NEWEST, "due", 1024, 0, "cmpl-1"), "KVR004"),
        (GRANTED + CAPPED + logged(NEWEST, "due", 2048, 0, "cmpl-1"), "KVR004"),
        # An error of a process that was asked to end is an echo, until an engine starts again in the same log.
        (UNKNOWN, "KVD199"),
        (ENDS + UNKNOWN, ""),
        (ENDS + STARTS + UNKNOWN, "KVD199"),
        # Ray buffers the lines of its workers: work from before the shutdown is printed after it.
        (RAN + RETRIEVED.format(30) + SIGTERM + EXITS, ""),
        (RAN + SIGTERM + RETRIEVED.format(30) + EXITS, ""),
        (RAN + SIGTERM + RETRIEVED.format(38) + EXITS, "KVD1906"),
        # Lines of a healthy system.
        ("INFO 12-03 01:24:31 [pynccl.py:70] loaded /x/libnccl.so: 2.27.3\n", ""),
        ("INFO 12-03 01:24:31 [async_llm.py:436] Aborted request(s) cmpl-7.\n", ""),
        ("loading /x/libnixl.so\n", ""),
        ("DEBUG 12-03 01:24:31 [x.py:7] the shared object store has 137 blocks\n", ""),
        # A general record never comes with a specific one.
        (raised([(ADAPTER, "start_load_kv", "open(path)")], "OSError: [Errno 24] Too many open files")
         + raised([("lmcache/any.py", "load", "import c_ops")], f"OSError: {LIBRARY}"), "KVD704"),
        ('Thread 1 "VLLM::EngineCor" received signal SIGSEGV, Segmentation fault.\n', "KVD383"),
        # Lookups of one request count once.
        (asked(NEWEST, 26, 0, 0, 0) * 50, ""),
        # KVD960 says more exactly what the line is, but is of LMCache before 0.3.10.post1.
        (version("0.3.9") + NO_INTEGER, "KVD960"),
        (version(NEWEST) + NO_INTEGER, "KVD860"),
    ],
)  # fmt: skip
def test_a_log_has_one_finding(log: str, code: str) -> None:
    assert codes(diagnose(log)) == ([code] if code else [])


def test_a_line_far_above_a_traceback_heads_nothing() -> None:
    """It stands alone, as it does above an exception that no record knows."""
    for apart, text in (("", "nobody knows this"), ("x\n" * 200, "No GPU context registered for 7")):
        assert "KVD915" in codes(diagnose(STORE_FAILED, apart, RETRIEVE.format(text)))


#: {the libraries in the wheel of nixl: records whose signs they print}. Both are compiled.
COMPILED = {
    "nixl_cu1*.libs/**/libuc*.so*": [
        each
        for each in problems.catalogue()
        if each.name in ("ucx-cannot-address-peer", "ucx-has-no-way-for-this-memory", "ucx-cuda-ipc-refused")
    ],
    ".nixl_cu1*.mesonpy.libs/**/lib[np]*.so*": [
        each for each in problems.catalogue() if 1150 <= int(each.code[3:]) <= 1170
    ],
}


@pytest.mark.parametrize("pattern", COMPILED)
def test_signs_of_a_library_stand_in_it(pattern: str) -> None:
    """A macro puts the function before a statement of NIXL's agent, and the level before one of UCX."""
    libraries = sorted(site_packages().glob(pattern))
    if not libraries:
        pytest.skip("nixl is not installed here, so that there is no library to look into")
    texts = b"".join(path.read_bytes() for path in libraries)
    assert len(COMPILED[pattern]) >= 3
    for sign in (sign for problem in COMPILED[pattern] for sign in problem.shows):
        for part in PLACE.split(re.sub(r"^(UCX  ERROR |\w+: )", "", sign.text))[::2]:
            assert part.strip().encode() in texts, sign
