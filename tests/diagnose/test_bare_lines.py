"""Lines without their logger's head, as people paste them; and what looks like one and is none."""

import pytest

from kvfix_tools.diagnose import statements
from kvfix_tools.diagnose.line_scanner import Scanner
from maintain.documentation import error_index
from tests.diagnose.lines import CORE, LMCACHE, VLLM, codes, diagnose, raised, real

LIBRARY = "/x/site-packages/lmcache/c_ops.cpython-312-x86_64-linux-gnu.so"
TORCH = "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
MP = "INFO 12-03 01:24:31 [factory.py:64] Creating v1 connector with name: LMCacheMPConnector and engine_id: 47\n"
WORKS = "(EngineCore pid=7) INFO 12-03 01:24:36 [core.py:7] any line\n"
UCX = "[1784273406.612345] [node7:99   :a]  "


#: Each message of the releases at which a rule looks, as the page "I see this error" has it.
MESSAGES = [
    (dist, row.message, row.level, " ".join(statements.sample(row.template.partition("\n")[0]).split()))
    for dist, rows in statements.known().items()
    for row in rows
    if row.message in error_index.kinds()
]
#: What LMCache and its copy in vLLM both say. Without its head the message is LMCache's.
BOTH = {text for dist, *_, text in MESSAGES if dist == "vllm"} & {each[-1] for each in MESSAGES if each[0] == "lmcache"}


def healthy() -> str:
    """Return a log of a running engine, without what tells its releases."""
    log = real("healthy-0.5.6").decode().partition("[shutdown]")[0]
    return "".join(f"{line}\n" for line in log.split("\n")[:-1] if "0.5.6" not in line and ".py:" not in line)


def test_a_message_is_the_same_finding_bare_with_its_prefix_and_in_a_log() -> None:
    known, log = 0, healthy()
    for dist, message, level, text in MESSAGES:
        kind = {"assert": "AssertionError: ", "text": "ConnectionError: "}.get(level, "")
        frame = LMCACHE if dist == "lmcache" else VLLM
        line = f"{CORE}{kind}{text}\n" if kind else frame.format(level="WARNING", text=text)
        expected = codes(diagnose(line))
        assert codes(diagnose(log, line)) == expected, text
        if text not in BOTH:
            assert codes(diagnose(f"{kind}{text}\n")) == expected, text
            assert diagnose(f"{kind}{text}\n").counts or message in error_index.RAISED, f"not recognised: {text}"
        known += bool(expected)
    assert known > 40


def test_a_stream_shows_what_it_is_in_later_blocks() -> None:
    """Its first block is one line of another program; lines of an engine come behind it."""
    scanner = Scanner()
    blocks = (
        "starting\n",
        LMCACHE.format(level="WARNING", text="nothing"),
        "a worker of mine: ValueError: no such thing\n",
    )
    found = [line.name for block in blocks for line in scanner.scan(block.encode())]
    assert found == ["logged", "raised"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"{LIBRARY}: undefined symbol: {TORCH}", "KVD701"),
        (f"/x/c_ops.cpython-312-x86_64-linux-gnu.so: undefined symbol: {TORCH}", "KVD701"),
        ("/x/plugin.so: undefined symbol: any_other", "KVD199"),
        ("libcudart.so.12: cannot open shared object file: No such file or directory", "KVD704"),
        ("  /lib/libc.so.6: version `GLIBC_2.32' not found (required by /x/torchac_cuda.cpython-312.so)", "KVD709"),
        ("Killed", "KVD853"),
        ("command terminated with exit code 137", "KVD853"),
        ("      Exit Code:    137", "KVD853"),
        ("Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f. Reason: Unknown.", "KVD941"),
        ("[0a1b2c3d:1    ] FATAL: UCX library was compiled with avx but CPU does not support it.", "KVD940"),
        ("Aborted (core dumped)", "KVD249"),
        ("Aborted", "KVD249"),
        ("Illegal instruction (core dumped)", "KVD250"),
        ("double free or corruption (!prev)", "KVD249"),
        ("CUDA error: an illegal memory access was encountered", "KVD240"),
        ("  what():  HIP error: invalid device function", "KVD199"),
        ("*** SIGSEGV (@0x0) received by PID 309 (TID 0x7f29) from PID 0; stack trace: ***", "KVD383"),
        ("Worker process terminated unexpectedly with signal 11", "KVD383"),
        ("==== backtrace (tid:  59888) ====", "KVD587"),
        ("/bin/sh: line 1: 77 Bus error               (core dumped) vllm serve", "KVD384"),
        ("ImportError: libetcd_wrapper.so: cannot open shared object file: No such file or directory", "KVD386"),
        ("[2026-02-23 16:08:35,513] LMCache ERROR: Error handling request RequestType.LOOKUP (mq.py:7:lmcache.mq)",
         "KVD212"),
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
def test_a_bare_line_is_explained_or_noticed(line: str, code: str) -> None:
    """Alone, and in the log of a running engine."""
    assert codes(diagnose(f"{line}\n"))[:1] == [code]
    assert codes(diagnose(f"{WORKS}{line}\n(APIServer pid=7) INFO any\n"))[:1] == [code]


def test_files_of_lmcache_do_not_say_that_vllms_connector_ran() -> None:
    frames = [("lmcache/v1/storage_backend/connector/nixl_connector_v3.py", "from_cache_engine_config", "ports[rank]")]
    log = diagnose(raised(frames, "IndexError: list index out of range"))
    assert codes(log) == ["KVD526"]
    assert "NixlConnector" not in log.who.connectors


def test_the_place_of_a_statement_says_which_connector_ran() -> None:
    line = "(Worker pid=7) ERROR 12-03 01:24:36 [nixl_connector.py:815] Something failed\n"
    assert diagnose(line).who.connectors == {"NixlConnector"}
