import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfix_tools.look import inject, other_process, ptrace
from kvfix_tools.look.other_process import Process
from tests.conftest import clean_environment

pytestmark = pytest.mark.skipif(not ptrace.MACHINE, reason="kvfix cannot call into a process on this architecture")


def value(process: subprocess.Popen[str], expression: str) -> str:
    code = f"import __main__, signal, threading; open(ANSWER, 'w').write(str({expression}))"
    return inject.run(process.pid, code, seconds=60)


def assert_answers(process: subprocess.Popen[str]) -> None:
    assert value(process, "threading.current_thread().name") == "MainThread"


@contextmanager
def target(does: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    command = [python, str(Path(__file__).with_name("injected_program.py")), does]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=clean_environment(), stdin=pipe, stdout=pipe, text=True) as process:
        try:
            remove_files(process)  # files of an earlier process with the same pid
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            remove_files(process)


def files(process: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/tmp").glob(f"kvfix-look-{process.pid}-*"))


def remove_files(process: subprocess.Popen[str]) -> None:
    for file in files(process):
        file.unlink()


@pytest.mark.parametrize("does", ["sleeps", "threads", "busy-threads", "lock", "sleep", "read"])
def test_the_main_thread_answers(does: str) -> None:
    with target(does) as process:
        assert_answers(process)
        assert_answers(process)
        assert not files(process)


def test_a_thread_that_has_gone_on_meanwhile_is_left_alone() -> None:
    """The thread may hold the mutex of Python's GIL. A call injected into the thread would then wait for ever."""

    class GoesOn(Process):
        def wait(self) -> str:
            while not (found := super().wait()):  # after "ready", the program needs a moment until it waits in read()
                pass
            program.stdin.write("x")
            program.stdin.flush()
            assert program.stdout.readline() == "goes on\n"
            return found

    with target("reads") as program:
        process = GoesOn(program.pid)
        assert not process.run_waiting(process.address("PyRun_SimpleString"))
        assert_answers(program)


def test_a_thread_that_waits_for_a_lock_of_python_is_left_alone() -> None:
    """The thread may hold the GIL's mutex. An injected call would then wait for ever and block all threads."""
    with target("own-lock") as process:
        with pytest.raises(inject.Silent):
            inject.run(process.pid, "pass", seconds=0.5)
        assert process.poll() is None


def test_a_file_is_read_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has its own path to a library of 20 MB (`/proc/PID/root/...`). All paths lead to one file."""
    contents = []
    exported = other_process._exported
    monkeypatch.setattr(other_process, "_SYMBOLS", {})
    monkeypatch.setattr(other_process, "_exported", lambda content: contents.append(content) or exported(content))
    with target("sleep") as first, target("sleep") as second:
        for pid in (first.pid, second.pid) * 2:
            assert Process(pid).address("PyRun_SimpleString")
    assert contents
    assert len(set(contents)) == len(contents)


def test_a_hundred_in_a_row_take_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvfix reads the memory maps once, even if they change, because a process with CUDA has thousands of maps."""
    read: list[Path] = []
    mapped = other_process._mapped_files
    monkeypatch.setattr(other_process, "_mapped_files", lambda process: read.append(process) or mapped(process))
    with target("sleeps") as process:
        inject.run(process.pid, "import __main__; __main__.more = bytearray(2**24)", seconds=60)
        counted = [int(value(process, "__main__.counted")) for _ in range(100)]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert counted == sorted(counted)
    assert counted[-1] > counted[0]  # the program's loop ran between the calls
    assert maps.count("6b76000") == 2  # start address and end address of the page that kvfix maps
    assert len(read) == 1


def test_a_computation_gets_its_registers_and_its_signals_back() -> None:
    """While numpy computes a sum, vector registers are in use. The injected `difftime` writes to these registers."""
    with target("computes") as process:
        engine = Process(process.pid)
        for _ in range(200):
            engine.call("difftime", 5, 3)
        assert value(process, "(__main__.wrong, signal.pthread_sigmask(0, ()))") == "(0, {<Signals.SIGTRAP: 5>})"


def test_an_error_of_the_code_is_an_answer_and_its_names_are_gone() -> None:
    with target("sleeps") as process:
        assert inject.run(process.pid, "1 / 0", seconds=60) == "failed: ZeroDivisionError: division by zero"
        assert inject.run(process.pid, "(", seconds=60).startswith("failed: SyntaxError")
        assert_answers(process)
        assert inject.run(process.pid, "left = 1", seconds=60) == ""
        names = value(process, "' '.join(vars(__main__))").split()
    assert "counted" in names
    assert not {"left", "os", "folder", "ANSWER"} & set(names)


def test_a_thread_in_c_is_silent_and_has_one_call_in_its_queue() -> None:
    """The process never runs the code of a call that timed out. The next call gets an answer."""
    with target("c") as process:
        for _ in range(3):
            with pytest.raises(inject.Silent, match=r"ran no Python bytecode in 0\.2 s"):
                inject.run(process.pid, "import __main__; __main__.late = True", seconds=0.2)
        assert len(files(process)) == 1
        process.stdin.write("\n")
        process.stdin.flush()
        assert value(process, "hasattr(__main__, 'late')") == "False"
        assert not files(process)


def test_an_exception_of_a_signal_handler_reaches_the_program() -> None:
    """Up to 0.11, vLLM's signal handler may raise SystemExit in injected code. The program must get the SystemExit."""
    code = "import signal; signal.raise_signal(signal.SIGINT)\nfor _ in range(10): pass"
    with target("sleeps") as process:
        assert inject.run(process.pid, code, seconds=60) == "failed: KeyboardInterrupt: "
        assert process.stdout.readline() == "interrupted\n"


def test_an_ended_process_and_another_program_are_refused() -> None:
    with target("sleeps") as process:
        pass
    with pytest.raises(inject.Refused, match=f"there is no process {process.pid}"):
        inject.run(process.pid, "pass", seconds=1)
    with subprocess.Popen(["sleep", "60"]) as sleep:
        with pytest.raises(inject.Refused, match="not a Python that kvfix can call"):
            inject.run(sleep.pid, "pass", seconds=1)
        assert sleep.poll() is None
        sleep.kill()


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptrace, "MACHINE", None)
    monkeypatch.setattr(other_process, "_SYMBOLS", {})
    with target("sleeps") as process, pytest.raises(inject.Refused, match=r"cannot call .* Use Python 3\.14"):
        inject.run(process.pid, "pass", seconds=1)


def test_a_process_that_ends_meanwhile() -> None:
    with target("sleeps") as process, pytest.raises(inject.Refused, match="has ended"):
        inject.run(process.pid, "import os; os._exit(0)", seconds=5)


def test_the_process_survives_the_end_of_kvfix_look(tmp_path: Path) -> None:
    """If `kvfix look` ends during a call, the process survives. A breakpoint without a tracer would end the process."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = "import sys; from kvfix_tools.look import inject; inject.run(int(sys.argv[1]), sys.argv[2], seconds=60)"
    with target("lock") as process:
        looker = subprocess.Popen(
            [sys.executable, "-c", code, str(process.pid), f"open({str(pipe)!r}).read()"],
            env=clean_environment(PYTHONPATH=os.pathsep.join(sys.path)),
        )
        with pipe.open("w"):  # the injected code has begun to read
            looker.kill()
            looker.wait()
        while "TracerPid:\t0\n" not in Path(f"/proc/{process.pid}/status").read_text():
            pass
        assert_answers(process)


@pytest.mark.parametrize("release", ["3.10", "3.12", "3.13"])
def test_pythons_of_other_releases(release: str) -> None:
    found = next(map(str, Path.home().glob(f".pyenv/versions/{release}.*/bin/python3")), None)
    if found is None:
        pytest.skip(f"there is no Python {release} here")
    for does in ("threads", "lock"):
        with target(does, found) as process:
            assert_answers(process)
