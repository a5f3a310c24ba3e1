"""Every record of a problem: its signs stand in the releases that it names, and a log with one is explained by it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import advice, problems
from kvfix_tools.diagnose.problems import Died, Logged, Problem, Stuck, nixl_statements
from kvfix_tools.diagnose.signs import PLACE
from tests.conftest import RELEASES, ROOT, release_names
from tests.diagnose.lines import codes, diagnose, site_packages
from tests.diagnose.releases import CORE

EVERY = pytest.mark.parametrize("problem", problems.catalogue(), ids=lambda problem: str(problem.name))
OLDER_VLLM = sorted((ROOT / ".cache/vllm").glob("*/lib/python*/site-packages"))
#: Where a record names no file of a release, or none that is here.
LMCACHE = "[2026-11-21 01:41:27,007] LMCache {level}: {text} (any.py:7:lmcache.any)\n"
VLLM = "(EngineCore_DP0 pid=276) {level} 12-03 01:24:36 [any.py:7] {text}\n"


def filled(text: str) -> str:
    return re.sub(r"<\w+>", "7", text)


def shown(problem: Problem, sign: problems.Sign) -> str:
    """A log with this sign, as the process of its code prints it."""
    if isinstance(sign, Logged):
        frame = LMCACHE if not sign.at.startswith("vllm/") else VLLM
        return frame.format(level="ERROR", text=filled(sign.text))
    if isinstance(sign, Stuck):
        file, _, function = sign.within.rpartition(":")
        return f"Thread 4242 (active+gil)\n    {function} (lmcache/{file}:7)\n    run (threading.py:9)\n"
    if isinstance(sign, Died):
        if not sign.within:
            text = filled(sign.text)
            return f"library.cpp:77: {text}: Assertion `held' failed.\n" if text.isidentifier() else f"ERROR {text}\n"
        file, _, function = ("", "", sign.within) if "::" in sign.within else sign.within.rpartition(":")
        return (
            f"Fatal Python error: {sign.text or 'Segmentation fault'}\n\n"
            "Current thread 0x00007f (most recent call first):\n"
            f'  File "/opt/app/{file or "any.py"}", line 7 in {function}\n'
            '  File "/opt/app/vllm/core.py", line 9 in run\n\n'
        )
    file, _, function = sign.within.rpartition(":")
    path = (
        sign.at if sign.at.endswith(file) and sign.at else file or ("any.py" if problem.general else "lmcache/any.py")
    )
    text = f": {filled(sign.text)}" if sign.text else ""
    caller = sign.through if sign.through.endswith(".py") else f"/{sign.through}/caller.py"
    lines = [
        "Traceback (most recent call last):",
        *([f'  File "/opt/app{caller}", line 5, in call', "    call()"] if sign.through else []),
        f'  File "/opt/app/{path}", line 7, in {function or "any"}',
        f"    {sign.source or 'call()'}",
        f"{sign.kind or 'RuntimeError'}{text}",
    ]
    return "".join(f"{CORE}{line}\n" for line in lines)


@EVERY
def test_each_sign_is_explained(problem: Problem) -> None:
    for sign in problem.shows:
        ran = (
            f"INFO 12-03 01:24:31 [factory.py:64] Creating v1 connector with name: {(*problem.connectors, '')[0]} and\n"
        )
        log = diagnose((ran if problem.named else "") + shown(problem, sign))
        assert problem.code in codes(log), (sign, shown(problem, sign))
        found = next(each for each in log.findings if each.rule.code == problem.code)
        assert "{" not in found.sentence
        assert "?" not in found.sentence, "a value that no sign has"
        remedy = advice.remedy(log, found)
        assert remedy.now
        assert remedy.good


def test_the_record_that_says_more_is_the_finding() -> None:
    """Both fit; one asks for the very module, the other for any of vLLM's that LMCache does not find."""
    log = diagnose(
        f"{CORE}Traceback (most recent call last):\n"
        f'{CORE}  File "/opt/app/lmcache/utils.py", line 7, in <module>\n{CORE}    from vllm.utils import torch_utils\n'
        f"{CORE}ModuleNotFoundError: No module named 'vllm.utils.torch_utils'\n"
    )
    assert codes(log) == ["KVD429"]


@EVERY
def test_the_record_is_whole(problem: Problem) -> None:
    assert re.fullmatch(r"KVD(?:\d{3}|[1-9]\d{3})", problem.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", problem.name)
    assert problem.title.endswith(".")
    assert problem.cause.endswith(".")
    assert "\n" not in problem.title
    assert len(problem.now) < 400
    assert all(thread.startswith("https://github.com/") for thread in problem.threads)
    for specifier in problem.releases.values():
        SpecifierSet(specifier)


def test_codes_and_names_are_unique() -> None:
    from kvfix_tools.diagnose import findings

    every = [*problems.catalogue(), *findings.catalogue()]
    assert len({each.code for each in every}) == len(every)
    assert len({each.name for each in every}) == len(every)


@lru_cache(maxsize=4096)
def source(path: Path) -> str:
    """Of the file, with strings that stand over several lines in one."""
    return re.sub(r"""["']\s*\n\s*[rbf]*["']""", "", path.read_text(errors="replace")) if path.exists() else ""


def places(at: str) -> dict[str, Path]:
    """{release: this file of it} of all releases that are here."""
    if at.startswith("lmcache/"):
        return {name: RELEASES / name / at for name in release_names()}
    found = {"0.32.0": site_packages() / at}
    for path in OLDER_VLLM:
        found[path.parents[2].name] = path / at
    return found


@EVERY
def test_signs_stand_in_the_releases(problem: Problem) -> None:
    """The longest part of the sign without a value, in the file that it names, of every release that is in range."""
    for sign in problem.shows:
        if isinstance(sign, Died | Stuck) or not sign.at:
            continue
        dist = sign.at.partition("/")[0]
        part = max(re.split(r"<\w+>", sign.text or getattr(sign, "source", "")), key=len).strip()
        range_ = SpecifierSet(problem.releases.get(dist, ""), prereleases=True)
        inside = {name: path for name, path in places(sign.at).items() if name in range_ and path.exists()}
        if not inside and dist == "vllm" and not OLDER_VLLM:
            pytest.skip(f"no vLLM {range_} with this file is here: `requirements/matrix` fetches older ones")
        assert inside, f"{sign.at} is in no release of {range_}"
        without = [name for name, path in inside.items() if not _stands(part, source(path))]
        assert len(without) < len(inside), (sign, part)
        assert not without, f"{part!r} is not in {sign.at} of {without}: narrow `releases`"


def _stands(part: str, text: str) -> bool:
    """Whatever the quotes and the line breaks."""
    plain, own = (re.sub(r"\s+", "", each).replace('"', "'") for each in (part, text))
    return plain in own


def test_a_value_in_between_may_be_a_whole_key() -> None:
    """As LMCache prints a CacheEngineKey, with a model that lies below a long path."""
    key = f"CacheEngineKey(model_name='/root/{'models/' * 30}', world_size=1, worker_id=0, request_configs=None)"
    text = f"Put task failed for key {key}: [Errno 32] Broken pipe"
    assert len(key) > 200
    assert "KVD866" in codes(diagnose(LMCACHE.format(level="ERROR", text=text)))


def test_infinistore_speaks_with_its_own_logger() -> None:
    """spdlog: the level stands in brackets, in small letters. What is no error of InfiniStore's says nothing."""
    line = "[2026-05-15 13:45:30.060] [{who}] [{level}] [rdma.cpp:118] GID is all zero\n"
    assert codes(diagnose(line.format(who="infini", level="error"))) == ["KVD462"]
    assert codes(diagnose(line.format(who="infini", level="info"))) == []
    assert codes(diagnose(line.format(who="other", level="info"))) == []


def test_cann_speaks_of_its_errors_in_brackets() -> None:
    """CANN's plog, which HCCL and the runtime also print: the level in brackets, then the module with its process."""
    line = "[{level}] RUNTIME(471,):2026-05-16-03:10:19.924.639 [memory.cpp:61]471 desc=[{text}]\n"
    text = "the current capture mode does not support this operation"
    assert codes(diagnose(line.format(level="ERROR", text=text))) == ["KVD121"]
    assert codes(diagnose(line.format(level="EVENT", text=text))) == []


def test_a_broken_connection_of_ucx_is_no_file_system() -> None:
    """Both say `Input/output error`: the one of a socket or a card, the other of a disk."""
    ucx = "[1744331142.028115] [node:2802608:3]  tcp_ep.c:1 UCX  ERROR tcp_ep 0x5: send failed: Input/output error\n"
    assert codes(diagnose(ucx)) == ["KVD148"]
    pool = "[1784273406.719544] [node:99:0]  mpool.c:246  UCX  ERROR   Failed to allocate a chunk: Input/output error\n"
    assert codes(diagnose(pool)) == ["KVD158"]
    disk = LMCACHE.format(level="ERROR", text="Failed to write /kv/7.pt: [Errno 5] Input/output error")
    assert "KVD148" not in codes(diagnose(disk))


def test_a_socket_that_cannot_read_gpu_memory_is_no_network() -> None:
    """Errno 14 is of the memory; the same statement with another one is of the peer or the network."""
    line = (
        "E0612 14:05:26.176716 1192408 tcp_transport.cpp:136] Session::writeBody failed. {data}Error: {why}, "
        "total_transferred_bytes_: 0, current transferred_bytes: 0\n"
    )
    bad, data = "Bad address (value: 14)", "Attempt to write data 0x7f using buffer 0x7f. "
    ended = (
        "[2025-06-12 14:05:26] Prefill transfer failed for request rank=0 req.bootstrap_room=88 with exception "
        "KVTransferError(bootstrap_room=88): Failed to send kv chunk of 88 to 10.0.0.1:39041\n"
    )
    for text in (line.format(data="", why=bad), line.format(data=data, why=bad) + ended):
        assert codes(diagnose(text)) == ["KVD1134"]
    reset = line.format(data="", why="Connection reset by peer (value: 104)")
    assert codes(diagnose(reset + ended)) == ["KVD224"]
    assert codes(diagnose(ended)) == ["KVD1140"]


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
    for name in ("ucx-cannot-address-peer", "ucx-has-no-way-for-this-memory", "ucx-cuda-ipc-refused"):
        problem = problems.find(name)
        assert problem is not None
        for sign in problem.shows:
            part = max((each.removeprefix("UCX  ERROR ") for each in PLACE.split(sign.text)[::2]), key=len)
            assert part.strip().encode() in texts, sign


def test_signs_of_nixl_stand_in_its_wheel() -> None:
    """As above. The function stands before a statement of the agent: its macro puts it there."""
    libraries = sorted(site_packages().glob(".nixl_cu1*.mesonpy.libs/**/*.so*"))
    if not libraries:
        pytest.skip("nixl is not installed here, so that there is no library to look into")
    texts = b"".join(path.read_bytes() for path in libraries if path.name.startswith(("libnixl", "libplugin_")))
    for problem in nixl_statements.PROBLEMS:
        for sign in problem.shows:
            for part in PLACE.split(re.sub(r"^\w+: ", "", sign.text))[::2]:
                assert part.encode() in texts, sign


def test_an_assertion_without_its_frames_is_known_by_its_source() -> None:
    assert codes(diagnose("    assert num_tokens_scheduled > 0\nAssertionError\n")) == ["KVD398"]
    assert codes(diagnose("    assert num_tokens_scheduled > 0\nValueError\n")) != ["KVD398"]


def test_what_an_engine_quotes_of_a_worker_is_looked_at() -> None:
    quoted = "Worker failed with error '{text}', please check the stack trace above for the root cause"
    line = f"{CORE}RuntimeError: {quoted}\n"
    assert codes(diagnose(line.format(text="CUDA out of memory. Tried to allocate 2.00 GiB."))) == ["KVD215"]
    # Of a release in which it is right, another cause is looked for.
    too_long = line.format(
        text="Sampled token IDs exceed the max model length. Total number of tokens: 9 > max_model_len: 8"
    )
    ran = f"{CORE}Initializing a V1 LLM engine (v{{}}) with config: model='m'\n"
    assert codes(diagnose(ran.format("0.26.0"), too_long)) == ["KVD1510"]
    assert codes(diagnose(ran.format("0.32.0"), too_long)) != ["KVD1510"]


def test_a_log_of_echoes_says_where_the_cause_stands() -> None:
    dead = "(APIServer pid=7) ERROR 11-21 01:42:28 [async_llm.py:525] AsyncLLM output_handler failed.\n"
    assert codes(diagnose(dead)) == ["KVD1041"]
    died = f"{CORE}Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n"
    assert codes(diagnose(died + dead)) == ["KVD1040"]
