import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import jsonschema
import pytest

from kvfix_tools.diagnose import command, log_files, report_json
from kvfix_tools.diagnose.command import FAIL_ON, Options
from tests.conftest import ROOT, Fresh, clean_environment
from tests.diagnose.lines import CORE, LOGS, NEWEST, asked, logged, real

COMMAND = [sys.executable, "-m", "kvfix_tools.cli", "diagnose"]
CRASH, HEALTHY = str(LOGS / "crash-0.3.10.log.gz"), str(LOGS / "healthy-0.5.6.log.gz")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*paths: str, json: bool = False, **options: Any) -> tuple[int, str, str]:
        code = command.main(list(paths), Options(**{"format": "json" if json else "text", **options}))
        return code, *capsys.readouterr()

    return run


def test_exit_codes_and_summary(run: Run, tmp_path: Path) -> None:
    code, out, err = run(HEALTHY)
    assert (code, err) == (0, "")
    assert out.endswith("nothing found: 12 requests, 221 lookups, 6 loads, 6 stores; no error\n")
    code, out, err = run(CRASH)
    assert (code, err) == (1, "")
    assert out.endswith("SUMMARY: kvfix-diagnose: KVD101 cached-hit-promised-whole\n")
    for part in (
        "granted 256, but hit 256 - computed 288 = -32; vLLM had 288 computed tokens",
        "Do now: kvfix run -- CMD, or kvfix.apply() (KVF001 lookup-cache-ignores-computed); without kvfix: upgrade to",
        "For good: upgrade to LMCache 0.3.10.post1",
    ):
        assert part in out
    assert "\x1b" not in out
    code, out, err = run(str(tmp_path / "nothing.log"))
    assert (code, out) == (2, "")
    assert "nothing.log" in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[2026-02-23 16:08:35,513] LMCache INFO: Initialized NONE_HASH=b'7' (token_hasher.py:159:lmcache)",
         "the lines of vLLM and LMCache in the input show neither requests nor failures"),
        ("2026-02-23 a line of another program", "no line of vLLM, LMCache or a KV connector was recognised"),
    ],
)  # fmt: skip
def test_a_log_that_tells_nothing(run: Run, tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "log").write_text(f"{line}\n")
    code, out, err = run(str(tmp_path / "log"))
    assert code == 2
    assert says in out
    assert "kvfix search" in err


def test_the_summary_names_each_crash_once(run: Run, tmp_path: Path) -> None:
    """A restarted engine dies of the same error again, in a request with another id."""
    life = real("crash-0.3.10")
    again = re.sub(rb"(\d+-)([0-9a-f]{8})\b", rb"9\1\2", life)
    assert again != life
    (tmp_path / "restarted.log").write_bytes(life + again)
    code, out, _ = run(str(tmp_path / "restarted.log"))
    assert code == 1
    assert out.endswith("SUMMARY: kvfix-diagnose: KVD101 cached-hit-promised-whole (2 requests)\n")
    assert out.count("Do now: ") == 1
    assert re.search(r"1 more: 9\d+-[0-9a-f]{8} \(--all shows each\)", out)
    assert run(str(tmp_path / "restarted.log"), everything=True)[1].count("Do now: ") == 2
    run(str(tmp_path / "restarted.log"), html=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert page.count("Do now: ") == 1
    assert re.search(r"1 more: 9\d+-[0-9a-f]{8}", page)


def test_readable_files_are_reported_next_to_a_damaged_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(Path(CRASH).read_bytes()[:-40])
    code, out, err = run(str(tmp_path / "cut.gz"), CRASH)
    assert code == 2
    assert "KVD101" in out
    assert "cut.gz: damaged" in err
    assert json.loads(run(str(tmp_path / "cut.gz"), json=True)[1])["complete"] is False


def test_findings_are_shown_when_the_page_cannot_be_written(run: Run, tmp_path: Path) -> None:
    code, out, err = run(CRASH, html=str(tmp_path / "no/page.html"), issue=str(tmp_path / "issue.md"))
    assert code == 2
    assert "KVD101" in out
    assert "no/page.html: No such file or directory; kvfix wrote nothing" in err
    assert (tmp_path / "issue.md").exists()
    assert "kvfix wrote nothing" in run(CRASH, issue=str(tmp_path / "no/issue.md"))[2]


def test_a_kind_of_failure_is_not_presented_as_its_cause(run: Run, tmp_path: Path) -> None:
    """A general finding explains what a message usually means. Text and JSON reports mark general findings."""
    log = tmp_path / "engine.log"
    log.write_text(f"{CORE}OSError: [Errno 98] Address already in use\n")
    out = run(str(log))[1]
    assert "KVD220" in out
    assert "  Usual causes: " in out
    assert "Why: " not in out
    assert "  usual causes: " in run(str(log), brief="-")[1]
    assert json.loads(run(str(log), json=True)[1])["findings"][0]["general"] is True
    assert "  Why: " in run(CRASH)[1]


def test_json_is_as_documented(run: Run, tmp_path: Path) -> None:
    cut = tmp_path / "cut.log"  # the finding in this log has a code with four digits
    cut.write_text(
        f"{CORE}Traceback (most recent call last):\n"
        f'{CORE}  File "/opt/nowhere/model.py", line 5, in forward\n{CORE}    return self.layer(x)\n'
    )
    schema = json.loads((ROOT / "docs/diagnose.md").read_text().partition("```json\n")[2].partition("```")[0])
    for log, code, many in ((CRASH, 1, 1), (HEALTHY, 0, 0), (str(cut), 0, 1)):
        exit_code, out, _ = run(log, json=True)
        answer = json.loads(out)
        jsonschema.validate(answer, schema)
        assert (answer["schema"], answer["complete"]) == (report_json.SCHEMA, True)
        assert (exit_code, len(answer["findings"])) == (code, many)
    assert answer["findings"][0]["severity"] == "note"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_one_request(run: Run) -> None:
    out = run(CRASH, request="1-aa3dc6b7")[1]
    assert "lookup at 288 computed tokens promises 0: hit 256 - computed 288 = -32, nothing to load" in out
    assert "Storing KV cache for 256 out of 256 tokens" in out
    assert "0-8805ffee" not in out
    assert "no recognised line names request never-seen" in run(CRASH, request="never-seen")[1]


def test_the_page_stands_alone_and_escapes_what_a_log_holds(run: Run, tmp_path: Path) -> None:
    evil = asked(NEWEST, 9, 0, 4, 4, "<b>x</b>") + logged(NEWEST, "degraded", "<script>alert(1)</script>")
    (tmp_path / "evil.log").write_text(evil)
    run(CRASH, HEALTHY, str(tmp_path / "evil.log"), html=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert all(word in page for word in ("KVD101", "Do now: ", "&lt;script&gt;"))
    assert not any(word in page for word in ("<script", "<b>x", "http:", "https:", "src=", "@import", "url("))


def test_findings_of_a_stream_are_shown_as_they_come() -> None:
    with Popen([*COMMAND, "-"], env=clean_environment(), stdin=PIPE, stdout=PIPE) as process:
        process.stdin.write(real("crash-0.3.10"))
        process.stdin.flush()
        assert b"KVD101" in process.stdout.readline()
        assert process.poll() is None
        process.stdin.close()
        assert process.stdout.read().endswith(b"SUMMARY: kvfix-diagnose: KVD101 cached-hit-promised-whole\n")
    assert process.returncode == 1


def test_progress_goes_to_a_terminal_and_only_there(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_bytes(real("healthy-0.5.6") + b"nothing that is read\n" * 1_700_000)
    ours, theirs = os.openpty()
    with Popen([*COMMAND, str(log)], env=clean_environment(TERM="xterm"), stdout=PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: shown_by(ours), b""))
        report = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0
    assert b"MB" in shown
    assert b"\nread 35.8 MB of " in report


def shown_by(terminal: int) -> bytes:
    """Return the next output, or b"" at the end. A terminal holds 4 KB, and a full terminal would stop the program."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # on Linux this error means that no process has the terminal open
        return b""


def test_no_token_ids_in_what_is_shown(run: Run, tmp_path: Path) -> None:
    """vLLM logs a request's token ids when a step fails. kvfix-diagnose removes token ids from the lines it shows."""
    (tmp_path / "log").write_text(logged(NEWEST, "degraded", f"bad input {[*range(9001, 9031)]}"))
    for options in ({"json": True}, {"everything": True}, {"html": str(tmp_path / "page")}):
        _, out, _ = run(str(tmp_path / "log"), **options)
        page = (tmp_path / "page").read_text() if "html" in options else ""
        assert "KVD207" in out + page
        assert "9015" not in out + page


SHORT = {
    "unsure": "multiproc_executor.py:1] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
    "slow": "scheduler.py:7] Failing 1 request(s) due to KV load failure (failure_policy=fail, 9 tokens affected).",
    "note": "x.py:1] one request was refused",
}


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, str]:
    for name, text in SHORT.items():
        (tmp_path / name).write_text(f"(EngineCore pid=7) ERROR 11-21 01:41:27 [{text}\n")
    return {"crash": CRASH, **{name: str(tmp_path / name) for name in SHORT}}


@pytest.mark.parametrize(
    ("fail_on", "failing"),
    [("certain", {"crash", "slow"}), ("crash", {"crash", "unsure"}), ("hang", {"crash", "unsure"}),
     ("risk", {"crash", "unsure", "slow"})],
)  # fmt: skip
def test_which_findings_fail(run: Run, logs: dict[str, str], fail_on: str, failing: set[str]) -> None:
    assert {name for name, log in logs.items() if run(log, fail_on=fail_on)[0] == 1} == failing
    assert {run(log, fail_on=fail_on, exit_zero=True)[0] for log in logs.values()} == {0}


def test_a_word_that_fail_on_does_not_know_is_refused(run: Run) -> None:
    code, out, err = run(CRASH, fail_on="any")
    assert (code, out) == (2, "")
    assert all(word in err for word in FAIL_ON)


def test_the_summary_says_what_is_not_certain(run: Run, logs: dict[str, str]) -> None:
    assert "(not certain)\n" in run(logs["unsure"])[1]
    _, out, _ = run(logs["note"])
    assert re.search(r"SUMMARY: kvfix-diagnose: nothing found: .*; 1 note\n", out)
    assert "note: KVD199 unknown-failure: error: one request was refused" in out


def test_findings_are_chosen_by_their_codes(run: Run) -> None:
    assert run(CRASH, select=("KVD1",))[0] == 1
    for options in ({"select": ("KVD2", "KVR")}, {"ignore": ("KVD101",)}):
        code, out, _ = run(CRASH, **options)
        assert code == 0
        assert "KVD101" not in out


def test_annotations_of_github(run: Run, logs: dict[str, str]) -> None:
    kinds = {}
    for name, log in logs.items():
        (line,) = run(log, format="github")[1].splitlines()
        kinds[name] = line.partition(" ")[0]
        assert re.fullmatch(r"::\w+ file=[^,:]+,line=\d+,title=KVD\d+ [\w-]+::.+", line)
    assert kinds == {"crash": "::error", "slow": "::error", "unsure": "::warning", "note": "::notice"}


def test_reading_that_is_interrupted_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "long.log"
    log.write_bytes(real("crash-0.3.10") + b"nothing that is read\n" * 333_333)
    take = log_files.blocks

    def blocks(*given: Any) -> Any:
        for number, block in enumerate(take(*given)):
            if number == 12:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(log_files, "blocks", blocks)
    code, out, err = run(str(log))
    assert code == 130
    assert "KVD101" in out
    assert "interrupted after 3 of 7 MB" in out
    assert "interrupted after 3 of 7 MB" in err
    assert json.loads(run(str(log), json=True)[1])["complete"] is False


@pytest.mark.parametrize("option", ["html", "issue", "brief"])
def test_only_files_of_kvfix_are_overwritten(run: Run, tmp_path: Path, option: str) -> None:
    log, out = tmp_path / "engine.log", tmp_path / "out"
    log.write_bytes(real("crash-0.3.10"))
    before = log.read_bytes()
    (tmp_path / "link").symlink_to(log)
    for path in (log, tmp_path / "link"):
        code, printed, err = run(str(log), **{option: str(path)})
        assert (code, printed) == (2, "")
        assert "is an input" in err
    assert log.read_bytes() == before
    (tmp_path / "link to out").symlink_to(out)
    for path in (out, out, tmp_path / "link to out"):  # kvfix overwrites a file that kvfix has written
        code, _, err = run(str(log), **{option: str(path)})
        assert code == 1
        assert f"wrote {path}" in err
    assert (tmp_path / "link to out").is_symlink()
    out.write_text("# notes of mine\n")
    code, _, err = run(str(log), **{option: str(out)})
    assert code == 2
    assert "kvfix did not write it" in err
    assert out.read_text() == "# notes of mine\n"


def test_a_page_is_written_whole_or_not_at_all(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, text: str, **_: str) -> None:
        path.write_bytes(text.encode()[:4096])
        raise OSError(28, "No space left on device")

    out = tmp_path / "page.html"
    out.write_text("<title>kvfix-diagnose: before</title>")
    monkeypatch.setattr(Path, "write_text", write_text)
    code, _, err = run(CRASH, html=str(out))
    assert code == 2
    assert "No space left on device; kvfix wrote nothing" in err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "before" in out.read_text()


def test_only_one_format_is_printed_at_a_time(run: Run) -> None:
    assert run(CRASH, json=True, brief="-")[0] == 2
    assert run(CRASH, json=True, request="r")[0] == 2


def test_a_report_that_cannot_be_written_is_an_error(fresh: Fresh) -> None:
    done = fresh.run(["sh", "-c", 'exec "$@" >/dev/full', "sh", *COMMAND, CRASH])
    assert done.returncode == 2
    assert done.stderr == "kvfix-diagnose: the report could not be written: No space left on device\n"


def test_options_of_the_command_line(logs: dict[str, str], fresh: Fresh) -> None:
    def answer(*arguments: str) -> tuple[int, str]:
        done = fresh.run([*COMMAND, *arguments])
        return done.returncode, done.stdout

    assert answer("--version")[1].startswith("kvfix ")
    assert answer("--format", "json", "--exit-zero", logs["crash"])[1].startswith("{")
    assert answer("--format", "xml", logs["crash"])[0] == 2
    assert answer("--ignore", "KVD1", "--fail-on", "risk", logs["crash"])[0] == 0


def test_a_finding_that_follows_stands_below_its_cause(run: Run) -> None:
    """The LMCache server does not support the worker's message type, so the worker dies."""
    _, out, _ = run(*(str(LOGS / f"mode-0.5.6{each}.log.gz") for each in ("", ".server")))
    assert out.index(" hang  KVD206") < out.index("  follows from KVD206 KVD116 server-silent-at-start")
    assert out.count("Do now: ") == 1
