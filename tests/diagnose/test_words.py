"""What has no line of a log in it: a title, a sentence with an error in backticks, a message wrapped by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfix_tools.diagnose import command, problems
from kvfix_tools.diagnose.pasted import SHORT
from kvfix_tools.diagnose.signs import PLACE, Died, Stuck
from tests.diagnose.lines import codes, diagnose
from tests.diagnose.releases import CORE

MMAP = 'File ".../vllm/v1/kv_offload/cpu/shared_offload_region.py", line 100, in __init__'
STALE = "assert req_id in self.requests"


def in_prose(sign: problems.Sign) -> str:
    """A sentence with what the sign shows."""
    text = PLACE.sub("x7", sign.text) or getattr(sign, "source", "")
    kind = getattr(sign, "kind", "")
    function = getattr(sign, "within", "").rpartition(":")[2]
    return f"# It ends in {function or 'a worker'} with `{f'{kind}: ' if kind else ''}{text}`, and nothing helped\n"


def test_most_signs_are_known_in_a_sentence_and_hardly_one_as_another() -> None:
    known = {"right": 0, "other": 0, "general": 0, "nothing": 0}
    for record in problems.catalogue():
        signs = [sign for sign in record.shows if not isinstance(sign, (Stuck, Died)) and (sign.text or sign.source)]
        for sign in [] if record.general or record.quotes else signs[:1]:
            found = next(iter(codes(diagnose(in_prose(sign)))), "")
            other = problems.find(found)
            general = other is not None and other.general
            known["right" if found == record.code else "general" if general else "other" if found else "nothing"] += 1
    everything = sum(known.values())
    assert known["right"] > 0.85 * everything, known
    assert known["other"] < 0.01 * everything, known
    assert known["general"] < 0.03 * everything, known


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("It says `OSError: [Errno 14] Bad address` in `shared_offload_region.py`, and loops.\n", "KVD625"),
        (f"[Bug]: {STALE} in _update_from_kv_xfer_finished when a client goes away\n", "KVD109"),
        (f"`Scheduler._update_from_kv_xfer_finished` dies:\n```python\n    {STALE}   # <-- here\n```\n", "KVD109"),
        ("Unsupported connector type: MyConnector\n", "KVD742"),
        ("pulling kv_caches for ['973c'] failed: Timeout waiting for P side ready.\n", "KVD501"),
        ("ValueError: To serve at least one request with the models's max seq len (128000),\n"
         "  (38.87 GiB KV cache is needed, which is larger than the\n  available KV cache memory (9.14 GiB)).\n",
         "KVD971"),
    ],
)  # fmt: skip
def test_the_words_of_a_problem_are_it_but_not_for_certain(text: str, code: str) -> None:
    log = diagnose(text)
    assert codes(log) == [code]
    assert log.findings[0].verdict == "unknown"


def test_only_a_short_text_is_searched_for_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "Unsupported connector type: MyConnector\n"
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_text(words)
    long.write_text(words + "a line of something else\n" * (SHORT // 20))
    assert command.main([str(short)]) == 1
    assert command.main([str(long)]) == 2
    assert "no line of vLLM" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_line_that_its_logger_calls_normal_says_nothing_wrong(level: str) -> None:
    line = f"{level} 12-03 01:24:31 [x.py:7] Unsupported connector type: MyConnector\n"
    assert codes(diagnose(line)) == []


def test_words_of_another_class_or_another_function_are_not_it() -> None:
    """The exception that was read has a class and frames of its own."""
    text = "Connector 'Mine' is not registered."
    frames = [
        "Traceback (most recent call last):",
        '  File "/opt/app/vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py", line 7, in {function}',
        "    call()",
        f"ValueError: {text}",
    ]
    dump = "".join(f"{CORE}{line}\n" for line in frames)
    assert "KVD1091" in codes(diagnose(dump.format(function="build_kv_connector_stats")))
    assert "KVD1091" not in codes(diagnose(dump.format(function="any_other")))


def test_marks_below_a_line_do_not_make_it_a_cut_one() -> None:
    """They end where the source ends: two lines of the same length, and no terminal has cut them."""
    source = "    handle = self.agent.prepXferDlist(agent_name, descs, handle_list)"
    marks = f"{'^' * 40:>{len(source)}}"
    pasted = f"{source}\n{marks}\nnixl._bindings.nixlNotFoundError: NIXL_ERR_NOT_FOUND\n"
    assert codes(diagnose(pasted)) == ["KVD373"]


@pytest.mark.parametrize("frame", [MMAP, MMAP.replace("line ", ""), f"  {MMAP}"])
def test_frames_as_reports_shorten_them(frame: str) -> None:
    log = diagnose(f"{frame}\n    self.mmap_obj.madvise(...)\nOSError: [Errno 14] Bad address\n")
    assert codes(log) == ["KVD625"]
    assert log.failures.raised[0].fields["frames"][-1][1:] == (100, "__init__")


def test_a_line_may_be_cut_in_the_middle_of_an_id() -> None:
    cut = (
        f"{CORE}RuntimeError: Remote NIXL agent engine ID mismatch. Expected 46126a31-6b81\n"
        "-435d-a116-e3e34a76ded3_dp0,received 96b1c4ff-9edf-4d21-b7cf-975a5f441d03_dp0.\n"
    )
    log = diagnose(cut)
    assert codes(log) == ["KVD551"]
    assert log.findings[0].verdict == "violated"


def test_a_sentence_below_the_longest_line_is_not_its_end() -> None:
    ucx = (
        "[1746690477.974497] [node:611  :0]     ucp_context.c:1268 UCX  WARN  transports 'cuda_ipc','cuda_copy' are "
        "not available, please use one or more of: mm, posix, self, shm, sm, sysv, tcp"
    )
    log = diagnose(f"{ucx}\nBackend UCX was instantiated\n")
    assert codes(log) == ["KVD556"]
    assert log.findings[0].sentence.endswith("sysv, tcp")
