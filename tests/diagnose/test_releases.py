import pytest
from msgspec import structs
from packaging.specifiers import SpecifierSet

from kvfix_tools.diagnose import advice, grammar, problems, releases
from kvfix_tools.diagnose.diagnosis import Diagnosis, diagnosed
from kvfix_tools.diagnose.problems import Problem
from tests.diagnose.lines import STARTS, vllm_releases

API = "(APIServer pid=7) INFO 12-03 01:24:01"
LOGO = "\u2588  version "


@pytest.mark.parametrize(
    ("line", "release"),
    [
        (f"{API} [utils.py:299]  \u2584\u2584 {LOGO}0.19.1rc1.dev301+g60995c05b", "0.19.1rc1.dev301"),
        (f"{API} [utils.py:299]  \u2584\u2584 {LOGO}\x1b[97;1m0.26.0\x1b[0m", "0.26.0"),
        (f"{API} [api_server.py:1839] vLLM API server version 0.11.0", "0.11.0"),
        (f"{API} [api_utils.py:327] vLLM server version 0.32.0, serving model /m/a", "0.32.0"),
        ("ERROR 12-03 01:24:01 [dump_input.py:72] Dumping input data for V1 LLM engine (v0.22.0) with: x", "0.22.0"),
        ("INFO 12-03 01:24:01 [llm_engine.py:240] Initializing a V0 LLM engine (v0.8.5) with config: x", "0.8.5"),
        ("vLLM Version                 : 0.22.1", "0.22.1"),
        ("          image: vllm/vllm-openai:v0.26.0@sha256:ffb2d59b1c05", "0.26.0"),
        ("          image: lmcache/vllm-openai:v0.4.2", ""),
        ("vLLM Version                 : 0.1.dev1+g127d96b.d20250624", ""),  # a checkout without tags has no release
    ],
)  # fmt: skip
def test_a_line_names_the_release(line: str, release: str) -> None:
    assert diagnosed(f"{line}\n".encode()).releases.named("vllm") == ([release] if release else [])


def died(place: str, words: str = "EngineCore encountered a fatal error.") -> str:
    head = f"(EngineCore pid=8) ERROR 12-03 01:24:36 [{place}] "
    return f"{head}{words}\n{head}Traceback (most recent call last):\n{head}AssertionError\n"


@pytest.mark.parametrize("release", sorted(vllm_releases()))
def test_the_line_at_which_enginecore_dies(release: str) -> None:
    """The line number in core.py shows the release, because vLLM releases log these messages at different lines."""
    lines = (vllm_releases()[release] / "vllm/v1/engine/core.py").read_text().splitlines()
    for words in ("EngineCore failed to start.", "EngineCore encountered a fatal error."):
        at = next(number for number, line in enumerate(lines, 1) if words in line)
        log = diagnosed(died(f"core.py:{at}", words).encode())
        assert log.releases.placed() == [release]
        assert log.releases.within("vllm", f"=={release}") is True
        # This log lacks the message, and begins with the traceback.
        assert diagnosed(died(f"v1/engine/core.py:{at}").partition("\n")[2].encode()).releases.placed() == [release]


def test_a_named_release_counts_more_than_a_place() -> None:
    log = diagnosed((STARTS.format("0.30.0") + died("core.py:1332")).encode())
    assert log.releases.one("vllm") == "0.30.0"
    assert log.releases.within("vllm", ">=0.30") is True


def test_other_files_and_lines_say_nothing() -> None:
    for place in ("core.py:3", "scheduler_core.py:1332", "multiproc_executor.py:1332"):
        assert diagnosed(died(place).encode()).releases.placed() == []


@pytest.mark.parametrize("place", sorted(grammar.TABLES.files))
def test_files_of_tracebacks_are_of_these_releases(place: str) -> None:
    """TABLES.files names the releases in which a file has code. A file of up to 20 lines counts as empty."""
    for release, packages in vllm_releases().items():
        path = packages / place
        files = [path] if path.suffix else [*path.rglob("*.py")] if path.is_dir() else []
        has = any(each.is_file() and len(each.read_text().splitlines()) > 20 for each in files)
        assert has == (release in SpecifierSet(grammar.TABLES.files[place])), release


def test_a_traceback_bounds_the_release() -> None:
    frame = '  File "/opt/vllm-source/vllm/distributed/kv_transfer/kv_connector/v1/nixl/{}.py", line 7, in read\n'
    for file, inside, outside in (("worker", "0.20.2", "0.26.0"), ("pull_worker", "0.26.0", "0.20.2")):
        log = diagnosed(f"Traceback (most recent call last):\n{frame.format(file)}AssertionError\n".encode())
        assert [inside in log.releases.placed(), outside in log.releases.placed()] == [True, False]
        assert log.releases.within("vllm", "<0.15") is False
    assert set(vllm_releases()) <= releases.known()


def warned(monkeypatch: pytest.MonkeyPatch, problem: Problem, release: str) -> Diagnosis:
    """Diagnose a log that names this vLLM release ("": no release). kvfix-diagnose knows only this problem."""
    monkeypatch.setattr(problems, "at", lambda line: (problem,) if line.name == "logged" else ())
    named = STARTS.format(release) if release else ""
    return diagnosed(f"{named}WARNING 12-03 01:24:36 [scheduler.py:7] strange things\n".encode())


WARNED = Problem(
    code="KVD9998", name="of-the-newest", effect="risk", title="", signs=("strange things",),
    why="", do="", for_good="-", releases={"vllm": ">=0.32"},
)  # fmt: skip
RIGHT = structs.replace(WARNED, releases={}, fixed_in={"vllm": "0.11.0"})


@pytest.mark.parametrize(
    ("problem", "release", "found"),
    [
        # 0.26.0 does not have the problem and 0.32.0 has the problem, so the verdict for 0.29.0 is unknown.
        (WARNED, "0.33.0", ["violated"]), (WARNED, "0.29.0", ["unknown"]), (WARNED, "0.26.0", []),
        (WARNED, "0.20.2", []), (RIGHT, "0.10.2", ["violated"]), (RIGHT, "0.21.0", []),
    ],
    ids=lambda value: value.code if isinstance(value, Problem) else "",
)  # fmt: skip
def test_affected_releases(problem: Problem, release: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.verdict for each in warned(monkeypatch, problem, release).findings if each.rule is problem] == found


PARTS = "vLLM 0.32.0, which pins in parts of 64 GiB; a smaller cache"


@pytest.mark.parametrize(
    ("release", "for_good", "good"),
    [
        ("0.29.0", PARTS, PARTS),
        ("0.32.0", PARTS, "a smaller cache"),
        ("", PARTS, PARTS),
        ("0.33.0", "vLLM 0.32.0 or newer", "--issue"),  # no remedy is left, so the user should report the problem
    ],
)
def test_a_used_release_is_no_remedy(release: str, for_good: str, good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = warned(monkeypatch, structs.replace(WARNED, releases={}, for_good=for_good), release)
    found = advice.remedy(log, log.findings[0]).good
    assert found == good or (good == "--issue" and good in found)
