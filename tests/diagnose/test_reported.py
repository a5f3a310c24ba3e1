from pathlib import Path

import pytest
import tomllib

from kvfix_tools.diagnose import statements
from kvfix_tools.diagnose.line_scanner import Scanner
from maintain.documentation import error_index
from tests.diagnose.lines import CORE, LMCACHE, VLLM, codes, diagnose, raised, real

REPORTED = tomllib.loads(Path(__file__).with_name("reported.toml").read_text())
WORKS = "(EngineCore pid=7) INFO 12-03 01:24:36 [core.py:7] any line\n"
#: (distribution, kind, level, text) of each logging statement that a finding reads. 7 replaces each value in the text.
MESSAGES = [
    (dist, row.message, row.level, " ".join(statements.sample(row.template.partition("\n")[0]).split()))
    for dist, rows in statements.known().items()
    for row in rows
    if row.message in error_index.kinds()
]
#: Texts that both LMCache and vLLM's copy of LMCache log. For a text without a prefix, kvfix assumes LMCache.
BOTH = {text for dist, *_, text in MESSAGES if dist == "vllm"} & {each[-1] for each in MESSAGES if each[0] == "lmcache"}


def healthy() -> str:
    """Return a running engine's log. Leave out lines that name LMCache's release or a source line such as core.py:7."""
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
    scanner = Scanner()
    another = LMCACHE.format(level="WARNING", text="nothing")
    blocks = ("starting\n", another, "a worker of mine: ValueError: no such thing\n")
    assert [line.name for block in blocks for line in scanner.scan(block.encode())] == ["logged", "raised"]


@pytest.mark.parametrize("case", REPORTED["logs"], ids=lambda case: case["finding"] or "none")
def test_a_log_has_one_finding(case: dict[str, str]) -> None:
    assert codes(diagnose(case["log"])) == [code for code in (case["finding"],) if code]


@pytest.mark.parametrize("case", REPORTED["lines"], ids=lambda case: case["finding"] or "none")
def test_a_bare_line_is_explained_or_noticed(case: dict[str, str]) -> None:
    assert codes(diagnose(f"{case['log']}\n"))[:1] == [case["finding"]]
    assert codes(diagnose(f"{WORKS}{case['log']}\n(APIServer pid=7) INFO any\n"))[:1] == [case["finding"]]


def test_a_line_far_above_a_traceback_heads_nothing() -> None:
    """An error line has its own finding if the exception follows far below, or if no finding explains the exception."""
    line = LMCACHE.format(level="ERROR", text="Cannot store keys due to exception")
    frames = [("lmcache/v1/multiprocess/modules/lmcache_driven_transfer.py", "retrieve", "self.context(instance)")]
    for apart, text in (("", "nobody knows this"), ("x\n" * 200, "No GPU context registered for 7")):
        assert "KVD915" in codes(diagnose(line, apart, raised(frames, f"ValueError: {text}").replace(CORE, "")))


def test_files_of_lmcache_do_not_say_that_vllms_connector_ran() -> None:
    frames = [("lmcache/v1/storage_backend/connector/nixl_connector_v3.py", "from_cache_engine_config", "ports[rank]")]
    log = diagnose(raised(frames, "IndexError: list index out of range"))
    assert codes(log) == ["KVD526"]
    assert "NixlConnector" not in log.who.connectors


def test_the_place_of_a_statement_says_which_connector_ran() -> None:
    line = "(Worker pid=7) ERROR 12-03 01:24:36 [nixl_connector.py:815] Something failed\n"
    assert diagnose(line).who.connectors == {"NixlConnector"}
