"""Run the README's code blocks. Instead of an engine, kvfix's lab runs the scenario for KVF001 with LMCache 0.3.10."""

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from tests.conftest import ROOT, release
from tests.diagnose.lines import real, site_packages
from tests.release.conftest import Shell


class Block(NamedTuple):
    section: str
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    found, section = [], ""
    for before, token in pairwise(MarkdownIt().parse(text)):
        if before.type == "heading_open":
            section = token.content
        elif token.type in ("fence", "code_block"):
            found.append(Block(section, token.info, token.content.strip("\n")))
    return found


README = blocks((ROOT / "README.md").read_text())
DIED, ELSE, UPSTREAM, MORE = "EngineCore died with this?", "Another problem?", "Send the fix upstream", "More"

#: A program that runs the scenario with the fixes, then without the fixes, and exits with the dead engine's error.
ENGINE = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from kvfix_tools.lab.scenario import find
from kvfix_tools.lab.engine.lab_engine import EngineDied, LabEngine
scenario = find("mismatch-in-tokens-to-load")
for _ in ("fixed", "as released"):
    world = LabEngine(scenario.options)
    try:
        scenario.play(world)
    except EngineDied:
        sys.exit("\\n".join(str(found) for found in world.findings))
    print("finished:", len(world.log), "events", file=sys.stderr)
    kvfix.revert()
"""


def of(section: str) -> list[Block]:
    found = [block for block in README if block.section == section]
    assert found, f"the README has no section {section!r} with code"
    return found


@pytest.fixture(scope="module")
def engine() -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(release("0.3.10")), str(site_packages())]), "VLLM_LOGGING_LEVEL": "ERROR",
        "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def printed(shell: Shell, engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the engine's output with the README's two lines, and the engine's output after `kvfix.revert()`."""
    (lines,) = (block.text for block in of(DIED) if block.language == "python")
    folder = tmp_path_factory.mktemp("engine")
    (folder / "serve.py").write_text(f"{lines}\n{ENGINE}")
    return shell("python serve.py", folder=folder, code=1, **engine).stderr.split("finished:")


def test_kvfix_is_installed_as_the_readme_says() -> None:
    """The fixture `shell` has run `pip install .`. No page says `pip install kvfix`: the name on PyPI is not ours."""
    assert "pip install ." in [block.text for block in of(DIED)]
    patterns = "README.md", "docs/*.md", "patches/**/*.py", "tools/**/*.py"
    pages = [page for pattern in patterns for page in ROOT.glob(pattern)]
    assert not [page.name for page in pages if re.search(r"p install [^`\n]*\bkvfix\b(?![-/])", page.read_text())]


def test_two_lines_fix_the_engine(printed: list[str]) -> None:
    fixed, died = printed
    text = of(DIED)[0].text.replace("\n", " ").removesuffix("...").removeprefix("AssertionError: ")
    assert text not in fixed
    assert text in died
    (lines,) = (block.text.splitlines() for block in of(DIED) if block.text.startswith("kvfix INFO"))
    for line in lines:
        assert re.search(re.escape(line).replace("7703", r"\d+"), fixed), fixed


def test_the_two_other_ways_reach_the_program(shell: Shell) -> None:
    (both,) = (block.text for block in of(DIED) if "vllm serve" in block.text)
    for line in both.splitlines():
        done = shell(line.replace("vllm serve ...", "python -c 'import os; print(os.environ[\"KVFIX\"])'"))
        assert done.stdout == "fix\n", done.stderr


def test_the_log_and_the_text_of_the_readme_are_diagnosed(shell: Shell, tmp_path: Path) -> None:
    (line,) = (block.text for block in of(ELSE) if block.text.startswith("kvfix-diagnose"))
    (tmp_path / "engine.log").write_bytes(real("crash-0.3.10"))
    done = shell(line, folder=tmp_path, code=1)
    assert "KVD101" in done.stdout
    assert "Do now: kvfix run -- CMD, or kvfix.apply() (KVF001 lookup-cache-ignores-computed)" in done.stdout
    text = of(DIED)[0].text.replace("\n", " ").removesuffix("...") + "cmpl-1"
    where = '  File "/lmcache/integration/vllm/vllm_v1_adapter.py", line 1, in update_state_after_alloc'
    (tmp_path / "engine.log").write_text(f"Traceback (most recent call last):\n{where}\n    assert (\n{text}\n")
    assert "KVF001" in shell("kvfix-diagnose engine.log", folder=tmp_path).stdout


def test_the_installation_is_asked(shell: Shell, engine: dict[str, str]) -> None:
    assert "`kvfix status` counts the bugs of your releases" in (ROOT / "README.md").read_text()
    done = shell("kvfix status", code=1, **engine)
    assert "lmcache 0.3.10" in done.stdout
    assert "to be fixed by kvfix.apply()" in done.stdout


def test_the_patch_is_exported_and_applies(shell: Shell, tmp_path: Path) -> None:
    (lines,) = (block.text.splitlines() for block in of(UPSTREAM))
    listed, export = lines
    assert "KVF003" in shell(listed).stdout
    refused = shell(export, folder=tmp_path, code=2)
    commands = re.findall(r"git config --global user\.\w+ [A-Z]+", refused.stderr)
    assert len(commands) == 2, refused.stderr
    shell("; ".join(commands).replace("NAME", "'A User'").replace("ADDRESS", "user@example.org"))
    shell(export, folder=tmp_path)
    (patch,) = (tmp_path / "patches").iterdir()
    assert "Signed-off-by: A User <user@example.org>" in patch.read_text()
    checkout = tmp_path / "LMCache"
    for name in [line[6:] for line in patch.read_text().splitlines() if line.startswith("--- a/")]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((release("0.5.6") / name).read_bytes())
    shell("git init -q && git add -A && git commit -qm 0.5.6", folder=checkout)
    shell(f"git am --3way {patch}", folder=checkout)
    assert "A User" in shell("git log -1 --format=%an", folder=checkout).stdout


def test_the_other_commands_are_there(shell: Shell) -> None:
    for line in "\n".join(block.text for block in of(MORE) if "kvfix" in block.text).splitlines():
        command = re.split(r"\s{2,}", line)[0]
        name = " ".join(word for word in command.split() if word.islower() or word.startswith("--"))
        shell(f"{name} --help || [ $? = 77 ]")


def test_the_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"(?:^    |`)make (\w+)", (ROOT / "README.md").read_text(), re.M))
    assert targets
    for target in targets:
        done = subprocess.run(["make", "-n", "-o", "install", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
