import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfix_tools import roundtrip
from kvfix_tools.roundtrip import backends, command
from kvfix_tools.roundtrip.backends.torch_copy import TorchCopy
from kvfix_tools.roundtrip.cell_check import Refused
from tests.conftest import Fresh

SIZES = ["--gib", "0", "--layout", "nhd", "--block", "16", "--chunk", "32", "--heads", "2", "--tokens", "33"]
QUICK = ["--backend", "torch", *SIZES]
ONE = [*QUICK, "--dtype", "uint8", "--slots", "random", "--skip", "none"]  # exactly one cell


def output_of(*arguments: str) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command.main([*arguments, "--device", "cpu", "--json"])
    answer: dict[str, Any] = json.loads(printed.getvalue())
    assert answer["exit"] == code
    return answer


def test_all_right() -> None:
    answer = output_of(*QUICK)
    assert answer["exit"] == 0
    assert {cell["verdict"] for cell in answer["cells"]} == {"passed"}
    assert answer["verified_bytes"] == sum(cell["verified"] for cell in answer["cells"])
    assert not any(cell["race"] for cell in answer["cells"])
    answer = output_of("--race")
    assert (answer["exit"], [cell["race"] for cell in answer["cells"]]) == (0, list(command.races.RACES))
    answer = output_of("--race", "late-producer")
    assert (answer["exit"], len(answer["cells"]), answer["speed"]) == (0, 1, [])


@pytest.mark.parametrize("options", [[*ONE, "--inject", "bitflip", "--seed", "5"], ["--inject", "missing-event"]])
def test_the_line_runs_a_cell_or_race_again(options: list[str]) -> None:
    answer = output_of(*options)
    first = answer["cells"][0]
    _, _, *again = shlex.split(first["command"])
    repeated = output_of(*again)
    [cell] = repeated["cells"]
    assert answer["exit"] == repeated["exit"] == 1
    assert (cell["cell"], cell["findings"]) == (first["cell"], first["findings"])


def test_the_text_names_what_is_wrong(fresh: Fresh) -> None:
    words = ["roundtrip", *ONE, "--device", "cpu", "--inject", "swap-kv"]
    done = fresh.run([sys.executable, "-m", "kvfix_tools.cli", *words])
    assert done.returncode == 1, done.stderr
    text = done.stdout
    assert "K and V swapped: layer 0 K, token 0, head 0 holds layer 0 V, slot" in text
    assert "swap-kv was planted in 1 cells and found in 1" in text
    assert "kvfix roundtrip --backend torch --layout nhd" in text
    assert "SUMMARY: 1 failed" in text
    assert "\x1b" not in text


def test_full_runs_more_cells() -> None:
    some = ["--backend", "torch", "--layout", "nhd", "mla", "--dtype", "uint8", "float16", "--slots", "random", "holes"]
    some += ["--skip", "none", "part", "--tokens", "17", "--block", "16", "--chunk", "16", "--heads", "1", "--gib", "0"]
    every = output_of(*some, "--full")
    assert (every["exit"], len(every["cells"])) == (0, 16)
    assert len(output_of(*some)["cells"]) < 16


def test_progress_is_for_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output_of(*ONE)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert output_of(*ONE)["exit"] == 0
    assert "0/1 torch nhd uint8" in capsys.readouterr().err


def test_the_speed_stands_beside_that_of_a_plain_copy(capsys: pytest.CaptureFixture[str]) -> None:
    answer = output_of(*ONE, "--gib", "0.01")
    [speed] = answer["speed"]
    assert speed["verdict"] == "passed"
    rates = ("store_gb_s", "load_gb_s", "plain_store_gb_s", "plain_load_gb_s")
    assert min(speed[rate] for rate in rates) > 0
    assert min(answer["cells"][0][rate] for rate in rates) > 0  # each cell also has rates
    command.main([*ONE, "--device", "cpu"])
    assert re.search(r"nhd  1 passed  store [\d.]+ GB/s \d+ %  load [\d.]+ GB/s \d+ %\n", capsys.readouterr().out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == 77
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--backend", "nothing"], ["--race", "nothing"], ["--tokens", "0"], ["--head-size", "3"], ["--layers", "5000"],
     ["--block", "x"], ["--tokens", "some"], ["--layout", "nothing"]],
    ids=" ".join,
)  # fmt: skip
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(command.main([*arguments, "--device", "cpu"]))
    assert ended.value.code == 2
    assert "kvfix roundtrip: " in capsys.readouterr().err


@pytest.fixture
def with_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs one cell with a test backend. opens: the function that opens the test backend."""

    def run_one(opens: Any, *more: str, missing: str | None = None) -> Any:
        backend = backends.Backend("mine", "", opens, lambda device: missing)
        monkeypatch.setattr(backends, "all_backends", lambda: {"mine": backend})
        return output_of(*ONE, "--backend", "mine", *more)

    return run_one


def test_a_backend_that_refuses_and_one_that_crashes(with_backend: Any) -> None:
    def refuse(check: Any) -> Any:
        raise Refused("not this one")

    answer = with_backend(refuse)
    [cell] = answer["cells"]
    assert (answer["exit"], cell["verdict"], cell["reason"]) == (77, "refused", "not this one")
    answer = with_backend(lambda check: [][1])
    [cell] = answer["cells"]
    assert (answer["exit"], cell["verdict"]) == (1, "crashed")
    assert "IndexError: list index out of range (test_command.py:" in cell["reason"]
    answer = with_backend(refuse, missing="it is not installed")
    assert (answer["exit"], answer["skipped"]) == (77, {"mine": "it is not installed"})


@pytest.mark.parametrize(
    ("more", "before", "inside"),
    [([], None, "fix"), ([], "check", "check"), ([], "off", "off"), (["--no-fixes"], None, "off"),
     (["--no-fixes"], "fix", "off")],
)  # fmt: skip
def test_kvfixes_fixes_are_applied_while_it_runs(
    with_backend: Any, monkeypatch: pytest.MonkeyPatch, more: list[str], before: str | None, inside: str
) -> None:
    """The command sets KVFIX during the run, because the engines of the run read their mode from KVFIX."""
    monkeypatch.delenv("KVFIX", raising=False)
    if before is not None:
        monkeypatch.setenv("KVFIX", before)
    inside_it: list[str | None] = []

    def look(check: Any) -> Any:
        inside_it.append(os.environ.get("KVFIX"))
        raise Refused("looked")

    with_backend(look, *more)
    assert inside_it == [inside]
    assert os.environ.get("KVFIX") == before


def test_what_was_found_before_an_error_is_not_lost(with_backend: Any) -> None:
    """A store moves nothing, and then a load raises NotImplementedError. The verdict is `failed`, not `refused`."""

    class Half(TorchCopy):
        def store(self, slots: torch.Tensor) -> None: ...

        def load(self, slots: torch.Tensor, skip: int) -> None:
            raise NotImplementedError("to load")

    answer = with_backend(Half)
    [cell] = answer["cells"]
    assert (answer["exit"], cell["verdict"], cell["findings"][0]["classes"].keys()) == (1, "failed", {"not written"})
    assert cell["reason"].startswith("NotImplementedError: to load (test_command.py:")


def test_a_copy_of_the_folder_needs_torch_alone(tmp_path: Path, fresh: Fresh) -> None:
    """docs/roundtrip.md tells the user to copy this folder to a GPU host."""
    source = Path(roundtrip.__path__[0])
    shutil.copytree(source, tmp_path / "kvfix_tools/roundtrip", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import runpy, sys
for name in ("typer", "rich", "kvfix", "vllm", "lmcache", "msgspec", "click"):
    sys.modules[name] = None
sys.path[:0] = [{str(tmp_path)!r}]
sys.path = [place for place in sys.path if not place.endswith(("/patches", "/tools"))]
from kvfix_tools.roundtrip import command
assert command.__file__.startswith({str(tmp_path)!r})
sys.argv[1:] = {[*ONE, "--device", "cpu"]!r}
try:
    runpy.run_module("kvfix_tools.roundtrip", run_name="__main__")
except SystemExit as ended:
    result = ended.code
"""
    assert fresh(code) == 0
