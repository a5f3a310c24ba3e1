import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from xml.etree import ElementTree

import pytest

from kvfix_tools.conform import command, verdicts
from kvfix_tools.conform.scenarios import NEEDS, SCENARIOS, WITHOUT
from kvfix_tools.lab.options import Options
from tests.conftest import NEWEST, Fresh, Once, run_forked

OWN = ["-q", "-rs", "-p", "no:cacheprovider", "-c"]  # options of a pytest in a separate process
FAULTS = {
    "CountsQuestions": "asked-again",
    "PromisesComputed": "promise",
    "HidesFailedLoads": "failed-load",
    "StoresAhead": "stored",
    "KeepsEnded": "keeps-nothing",
    "ResetsNothing": "reset",
    "ForgetsAborted": "given-back",
    "TakesFirstBlocks": "preempted",
    "ReportsTwice": "reported-once",
    "LeavesOutALayer": "granted",
    "ChangesTheOutput": "scheduler-output",
    "HandsOutRequests": "kinds",
}


def subject(name: str) -> Any:
    from kvfix_tools.conform.player import Subject

    return Subject(f"tests.conform.broken:{name}", {"folder": "{dir}"}, "tests.conform.broken:lose")


def commanded(name: str) -> Any:
    given = (f"tests.conform.broken:{name}", '{"folder": "{dir}"}', "tests.conform.broken:lose", 60.0, "0:6", True)
    with redirect_stdout(io.StringIO()) as printed, NamedTemporaryFile() as junit:
        code = command.conform(*given, json=True, junit=Path(junit.name))
        return {**json.loads(printed.getvalue()), "code": code, "junit": junit.read().decode()}


def faults() -> Any:
    """For each connector of FAULTS, play scenarios until one shows the fault. Return violations and number of steps."""
    found = {}
    with command.chosen(fixes=True):
        for name, rule in FAULTS.items():
            run = verdicts.Run(subject(name))
            for each in SCENARIOS:
                if each.rule in (rule, "granted", "aborted"):
                    run.scenario(each.name)
                    broken = [one._asdict() for one in run.violations if one.rule == rule]
                    found[name] = {"broken": broken, "steps": len(each.schedule)}
                    if broken:
                        break
    return found


def says() -> Any:
    """Return the output for a connector that stores nothing, for a missing connector, and for a violation."""
    with command.chosen(fixes=True):
        nothing = verdicts.run(subject("StoresNothing"), 0, range(0))
        nowhere = verdicts.run(subject("Nowhere"), 0, range(0))
        run = verdicts.Run(subject("ResetsNothing"))
        run.scenario("reset-of-the-connector")
    with redirect_stdout(io.StringIO()) as table:
        command.show(run)
    return {
        "nothing": {**nothing.as_json(), "code": nothing.exit_code},
        "nowhere": {**nowhere.as_json(), "code": nowhere.exit_code},
        "wrong": {"junit": command.as_junit(run).decode(), "code": run.exit_code, "table": table.getvalue()},
    }


def test_connector_of_the_documentation_keeps_all(once: Once) -> None:
    good = once(commanded, NEWEST, "FolderConnector")
    assert (good["violations"], good["code"], good["seeds"]) == ([], 0, 6)
    assert [each["rule"] for each in good["verdicts"]] == [rule.slug for rule in verdicts.RULES]
    assert [each["rule"] for each in good["verdicts"] if each["outcome"] != "ok"] == ["groups"]
    assert good["counts"]["loaded_tokens"] > 1000
    assert {case["name"]: case["reason"] for case in good["scenarios"] if case["outcome"] == "not applicable"} == {
        "aborted-before-the-answer": WITHOUT["aborted_looking"],
        "sliding-window": NEEDS["groups"],
        "sliding-window-preempted": NEEDS["groups"],
    }
    suite = ElementTree.fromstring(good["junit"])
    assert suite.attrib["tests"] == str(len(SCENARIOS))
    assert suite.attrib["failures"] == suite.attrib["errors"] == "0"
    assert suite.attrib["skipped"] == str(len(suite.findall("testcase/skipped"))) == "3"


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_fails_by_its_rule(once: Once, name: str) -> None:
    found = once(faults, NEWEST)[name]
    assert found["broken"], f"no scenario violates the rule {FAULTS[name]}"
    assert 0 < len(found["broken"][0]["schedule"]) <= found["steps"]
    assert found["broken"][0]["history"]


def test_a_connector_that_stores_nothing_or_cannot_be_made_says_what_is_not_tested(once: Once) -> None:
    done = once(says, NEWEST)["nothing"]
    assert (done["violations"], done["code"]) == ([], 2)
    assert "no hit and no load" in done["tested_nothing"]
    verdicts = {each["rule"]: each["outcome"] for each in done["verdicts"]}
    assert verdicts["raises-nothing"] == verdicts["keeps-nothing"] == "ok"
    assert verdicts["granted"] == verdicts["promise"] == "not applicable"
    done = once(says, NEWEST)["nowhere"]
    assert done["code"] == 2
    assert "Nowhere not found in tests.conform.broken" in done["cannot"]


def test_a_violation_has_its_schedule_in_table_and_junit(once: Once) -> None:
    done = once(says, NEWEST)["wrong"]
    (failure,) = ElementTree.fromstring(done["junit"]).findall("testcase/failure")
    assert "LAB001" in failure.attrib["message"]
    assert "new_weights()" in str(failure.text)
    assert done["code"] == 1
    assert all(each in done["table"] for each in ("new_weights()", *(rule.slug for rule in verdicts.RULES)))


def test_every_scenario_is_about_a_rule() -> None:
    names = [each.name for each in SCENARIOS]
    assert len(names) == len(set(names)) >= 30
    for each in SCENARIOS:
        assert each.rule in verdicts.SLUGS
        assert set(each.proof) <= set(WITHOUT)
        assert set(each.needs) <= set(NEEDS)


def test_wrong_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.conform("a:B", "[1]", "", 0.0, "0:0", True, json=True, junit=None) == 2
    assert "JSON object" in capsys.readouterr().err


def test_pytest_runs_the_scenarios(tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    connector = ["--kv-connector", "tests.conform.broken:ResetsNothing", "--kv-config", '{"folder": "{dir}"}']
    chosen = "whole-prompt or reset-of-the-connector or sliding-window"
    command = [sys.executable, "-m", "pytest", *OWN, str(settings), *connector, "--kv-seconds", "0", "-k", chosen]
    done = run_forked([*command, str(tmp_path)], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for part in ("1 failed, 1 passed, 2 skipped", "reset: LAB001", "new_weights()", "does not have SupportsHMA"):
        assert part in done.stdout


def test_pytest_without_the_option_imports_nothing(tmp_path: Path, fresh: Fresh) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\ndef test_it():\n"
        "    assert 'kvfix_tools.conform.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'vllm', 'rich', 'typer', 'kvfix'} & set(sys.modules)\n"
    )
    done = fresh.run([sys.executable, "-m", "pytest", *OWN, str(tmp_path / "pytest.ini"), str(tmp_path)])
    assert "1 passed" in done.stdout, done.stdout + done.stderr


CONTENTS = [-7_205_759_403_792_794, 1, 2**62 + 9, 77]  # contents of a block in the lab's TensorMemory
#: Functions that write wrong KV into block 1 of the first layer.
WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "another layer": lambda first, second: first[1].copy_(second[1]),
    "V in place of K": lambda first, _: first[1].copy_(first[1].roll(32, dims=-1)),
    "one slot further": lambda first, _: first[1].copy_(first[1].roll(1, dims=1)),
    "in part": lambda first, _: first[1, :, :, 40:].zero_(),
    "one element": lambda first, _: first[1, 0, 2, 50].add_(1),
    "not a number": lambda first, _: first[1].fill_(float("nan")),
}


def moved(first: Any, _: Any) -> None:
    first[1].copy_(first[1].bfloat16().float())


def seen() -> Any:
    """Change block 1 with each function of WRONG, and with `moved`. Return the contents that the lab then reads."""
    from kvfix_tools.lab.engine import kv_layout, vllm_objects
    from kvfix_tools.lab.engine.tensor_memory import TensorMemory

    options = Options(connector="a:B", layers=2, block_size=4, num_blocks=3, max_model_len=64)
    found = {}
    for name, do in {**WRONG, "in half precision": moved}.items():
        memory = TensorMemory(kv_layout.kv_cache(options, vllm_objects.vllm_config(Options(num_blocks=3))))
        block = memory.blocks[1]
        block[:] = CONTENTS
        others = [memory.go_on(layer) for layer in memory.layers()[1:]]
        first, second = memory.kv_caches.values()
        do(first, second)
        memory.begin()
        found[name] = {"contents": block[:], "others": [sorted(each) for each in others]}
    return found


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kv_is_seen_and_what_was_only_moved_is_right(once: Once, fault: str) -> None:
    found = once(seen, NEWEST)
    assert found["in half precision"] == {"contents": CONTENTS, "others": [[]]}
    contents = found[fault]["contents"]
    assert contents != CONTENTS
    assert set(contents) <= {-1, *CONTENTS}
