"""Lines that only a few words tell apart, and what of a line a record needs."""

from __future__ import annotations

import re

import pytest

from kvfix_tools.diagnose import problems
from kvfix_tools.diagnose.signs import PLACE
from tests.diagnose.lines import codes, diagnose, site_packages
from tests.diagnose.releases import CORE
from tests.diagnose.sign_logs import LMCACHE


def test_a_value_in_between_may_be_a_whole_key() -> None:
    """As LMCache prints a CacheEngineKey, with a model that lies below a long path."""
    key = f"CacheEngineKey(model_name='/data/{'models/' * 30}', world_size=1, worker_id=0, request_configs=None)"
    text = f"Put task failed for key {key}: [Errno 32] Broken pipe"
    assert len(key) > 200
    assert "KVD866" in codes(diagnose(LMCACHE.format(level="ERROR", text=text)))


def test_a_broken_connection_of_ucx_is_no_file_system() -> None:
    """Both say `Input/output error`: the one of a socket or a card, the other of a disk."""
    ucx = "[1744331142.028115] [node:2802608:3]  tcp_ep.c:1 UCX  ERROR tcp_ep 0x5: send failed: Input/output error\n"
    assert codes(diagnose(ucx)) == ["KVD148"]
    disk = LMCACHE.format(level="ERROR", text="Failed to write /kv/7.pt: [Errno 5] Input/output error")
    assert "KVD148" not in codes(diagnose(disk))


def test_a_socket_that_cannot_read_gpu_memory_is_no_network() -> None:
    """Errno 14 is of the memory; the same statement with another one is of the peer or the network."""
    line = (
        "E0612 14:05:26.176716 1192408 tcp_transport.cpp:136] Session::writeBody failed. {data}Error: {why}, "
        "total_transferred_bytes_: 0, current transferred_bytes: 0\n"
    )
    bad, data = "Bad address (value: 14)", "Attempt to write data 0x7f using buffer 0x7f. "
    for text in (line.format(data="", why=bad), line.format(data=data, why=bad)):
        assert codes(diagnose(text)) == ["KVD1134"]
    reset = line.format(data="", why="Connection reset by peer (value: 104)")
    assert codes(diagnose(reset)) == ["KVD224"]


def test_a_refused_handshake_of_rdma_is_not_the_metadata() -> None:
    """The file that logs it is the metadata's; what failed is the queue pair."""
    line = (
        "E1216 08:39:47.366148 15997 transfer_metadata.cpp:793] Handshake request is rejected by peer endpoint "
        "127.0.0.1:8144@mlx5_0, message: Failed to modity QP to RTR, check mtu, gid, peer lid, peer qp num. Please\n"
    )
    assert codes(diagnose(line)) == ["KVD505"]


def test_signs_of_ucx_stand_in_the_ucx_that_nixl_brings() -> None:
    """UCX is compiled: its statements are looked for in the libraries of nixl's wheel."""
    libraries = sorted(site_packages().glob("nixl_cu1*.libs/**/libuc*.so*"))
    if not libraries:
        pytest.skip("nixl is not installed here, so that there is no UCX to look into")
    texts = b"".join(path.read_bytes() for path in libraries)
    names = {"ucx-cannot-address-peer", "ucx-has-no-way-for-this-memory", "ucx-cuda-ipc-refused"}
    known = [each for each in problems.catalogue() if each.name in names]
    assert len(known) == 3
    for problem in known:
        for sign in problem.shows:
            part = max((each.removeprefix("UCX  ERROR ") for each in PLACE.split(sign.text)[::2]), key=len)
            assert part.strip().encode() in texts, sign


def test_signs_of_nixl_stand_in_its_wheel() -> None:
    """As above. The function stands before a statement of the agent: its macro puts it there."""
    libraries = sorted(site_packages().glob(".nixl_cu1*.mesonpy.libs/**/*.so*"))
    if not libraries:
        pytest.skip("nixl is not installed here, so that there is no library to look into")
    texts = b"".join(path.read_bytes() for path in libraries if path.name.startswith(("libnixl", "libplugin_")))
    for problem in (each for each in problems.catalogue() if 1150 <= int(each.code[3:]) <= 1170):
        for sign in problem.shows:
            for part in PLACE.split(re.sub(r"^\w+: ", "", sign.text))[::2]:
                assert part.encode() in texts, sign


def test_an_assertion_without_its_frames_is_known_by_its_source() -> None:
    assert codes(diagnose("    assert effective_cpu_size > 0\nAssertionError\n")) == ["KVD849"]
    assert codes(diagnose("    assert effective_cpu_size > 0\nValueError\n")) != ["KVD849"]


def test_what_an_engine_quotes_of_a_worker_is_looked_at() -> None:
    quoted = "Worker failed with error '{text}', please check the stack trace above for the root cause"
    line = f"{CORE}RuntimeError: {quoted}\n"
    assert codes(diagnose(line.format(text="CUDA out of memory. Tried to allocate 2.00 GiB."))) == ["KVD215"]


def test_a_log_of_echoes_says_where_the_cause_stands() -> None:
    dead = "(APIServer pid=7) ERROR 11-21 01:42:28 [async_llm.py:525] AsyncLLM output_handler failed.\n"
    assert codes(diagnose(dead)) == ["KVD1041"]
    died = f"{CORE}Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n"
    assert codes(diagnose(died + dead)) == ["KVD1040"]
