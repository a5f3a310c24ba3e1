import builtins
import json
import traceback
from typing import Any

import pytest

from kvfix_tools.diagnose.diagnosis import diagnosed
from kvfix_tools.diagnose.log_line import without_colours
from tests.diagnose.lines import codes, diagnose, real, scanned

CRASH = real("crash-0.3.10")


def each(log: bytes, prefix: str) -> bytes:
    return "".join(f"{prefix}{line}\n" for line in log.decode().splitlines()).encode()


def as_json(log: bytes, key: str, end: str = "", many: int = 1, **more: Any) -> bytes:
    """Return the log as a JSON logger writes it. Each JSON record has `many` lines of the log."""
    found = log.decode().splitlines()
    groups = ["\n".join(found[at : at + many]) + end for at in range(0, len(found), many)]
    return "".join(json.dumps({key: group, **more}) + "\n" for group in groups).encode()


def docker(log: bytes) -> bytes:
    return as_json(log, "log", "\n", stream="stderr", time="2026-11-21T10:22:55.1Z")


FORMATS = {
    "as it is": lambda log: log,
    "CRLF": lambda log: log.replace(b"\n", b"\r\n"),
    "Docker": docker,
    "Loki": lambda log: as_json(log, "line", timestamp="2026-11-21T10:22:55.1Z", labels={"pod": "vllm-0"}),
    "messages of several lines": lambda log: as_json(log, "message", many=40, level="info"),
    "kubectl": lambda log: each(log, "[pod/vllm-decode-6d4b/engine] 2026-11-21T10:22:55.123456789Z "),
    "journald": lambda log: each(log, "Nov 21 10:22:55 node-3 vllm[4144]: "),
    "journald in French": lambda log: each(log, "déc. 19 02:07:16 node-3 bash[2211]: "),
    "CRI": lambda log: each(log, "2026-11-21T10:22:55.123456789Z stderr F "),
    "Docker Compose": lambda log: each(log, "vllm-1  | "),
    "found by grep": lambda log: each(docker(log), "f847-json.log:190174:"),
    "quoted": lambda log: each(log, "> "),
    "code fence": lambda log: b"Here is the log:\n```text\n" + log + b"```\n",
    "without colours": without_colours,
    "colours without their escape": lambda log: log.replace(b"\x1b", b""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_crash_is_explained_in_every_format(name: str) -> None:
    text = FORMATS[name](CRASH)
    log, plain = diagnosed(text), diagnosed(CRASH)
    assert codes(log) == ["KVD101"]
    if "several" not in name and "fence" not in name:
        number = log.findings[0].evidence[0].line
        assert b"Mismatch in tokens to load" in b"".join(text.split(b"\n")[number - 1 : number + 3])
    assert log.findings[0].sentence == plain.findings[0].sentence
    assert '"stream"' not in log.findings[0].evidence[0].text
    assert log.counts["asked"] == plain.counts["asked"]
    found, expected = ({line.fields["class"] for line in read.failures.raised} for read in (log, plain))
    assert found == expected


def test_a_group_of_exceptions_is_what_its_members_are() -> None:
    """The finding names the first member's error, or the group's error if the log ends before the members."""

    def failed(kind: type[Exception], text: str) -> Exception:
        try:
            raise kind(text)
        except kind as error:
            return error

    def start_load_kv() -> None:
        raise builtins.ExceptionGroup("two loads", [failed(ConnectionError, "no store"), failed(ValueError, "size")])

    with pytest.raises(builtins.ExceptionGroup) as raised:
        start_load_kv()
    log = "".join(traceback.format_exception(raised.value))
    (found,) = diagnosed(log.encode()).findings
    assert found.rule.code == "KVD199"
    assert found.sentence.startswith("ConnectionError: no store")
    (cut,) = diagnosed(log.partition("  +-+--")[0].encode()).findings
    assert cut.sentence.startswith("ExceptionGroup: two loads")


#: The traceback of a failed LMCache assertion without a message (KVD849).
ASSERTED = (
    "Traceback (most recent call last):",
    '  File "/opt/app/lmcache/v1/storage_backend/local_cpu_backend.py", line 60, in initialize_allocator',
    "    assert effective_cpu_size > 0",
    "           ^^^^^^^^^^^^^^^^^^^^^^",
    "AssertionError",
)


@pytest.mark.parametrize(
    "prefix",
    [
        "[rank0]: ", "[default3]:", "2026-11-21T10:22:55.123456789Z [rank1]: ",
        "(RayWorkerWrapper pid=1234, ip=10.0.0.5) ", "(ApiServer_0 pid=1) (EngineCore_DP0 pid=772, ip=10.0.0.5) ",
        "vllm-0 stderr | ", "0: ", "node01: ", "[2026-11-21 10:22:5{number}] ", "10:22:55.12{number} ",
        "2026-11-21T10:22:55.12{number}Z\t", "102{number} ",
    ],
)  # fmt: skip
def test_a_traceback_behind_the_prefix_of_a_launcher(prefix: str) -> None:
    """torch, torchrun, Ray, Docker, srun and pdsh put a prefix before each line, in place of the logger's prefix."""
    rows = [prefix.format(number=number) + line for number, line in enumerate(ASSERTED)]
    assert codes(diagnose("\n".join(rows))) == ["KVD849"]
    assert codes(diagnose("\n".join(rows[1:]))) == ["KVD849"], "cut off above"


def test_a_traceback_that_lost_its_blanks_or_its_lines() -> None:
    """A paste without a code fence loses its indentation. `repr` prints a traceback in one line."""
    assert codes(diagnose("\n".join(line.strip() for line in ASSERTED if "^" not in line))) == ["KVD849"]
    in_one = "\\n".join(ASSERTED).replace('"', '\\"')
    assert codes(diagnose(f'2026-11-21 ERROR "{in_one}\\n"')) == ["KVD849"]


def test_tracebacks_of_two_ranks_are_taken_apart() -> None:
    """torch mixes the lines of all ranks in one log."""
    ranks = (
        ("first", "assert issubclass(connector_cls, KVConnectorBase)", "AssertionError"),
        ("second", "raise ValueError(text)", "ValueError: another"),
    )
    trace = ("Traceback (most recent call last):", '  File "/opt/app/vllm/x.py", line 60, in {0}', "    {1}", "{2}")
    rows = [f"[rank{rank}]: {line.format(*parts)}" for line in trace for rank, parts in enumerate(ranks)]
    raised = [line for line in scanned("\n".join(rows)) if line.name == "raised"]
    assert [(line.process, line.fields["frames"][0][2], line.fields["source"]) for line in raised] == [
        (f"rank{rank}", *parts[:2]) for rank, parts in enumerate(ranks)
    ]
