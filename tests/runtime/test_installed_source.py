import shutil
from pathlib import Path

import pytest

from kvfix import installed_source
from tests.conftest import ADAPTER, Fresh, release

FUNCTION = '''
class Connector:
    @decorated
    def hook(self, request):
        """What it does."""
        if request:  # a comment
            return f"{request.id} and {request.total:>{4}} {{x}}"
        return 0
'''

SAME = {
    "a comment": ("# a comment", "# another one"),
    "the docstring": ("What it does.", "What it\n        does, at length."),
    "white space": ("return 0", "return   0\n"),
    "an empty line": ("        return 0", "\n\n        return 0"),
    "the rest of the file": ("class Connector", "import os\n\n\nclass Connector"),
}
DIFFERENT = {
    "a number": ("return 0", "return 1"),
    "an f-string": (">{4}", ">{5}"),
    "blanks in a string": (" and ", "  and "),
    "indentation": ("        return 0", "            return 0"),
    "the decorator": ("@decorated", "@undecorated"),
    "an argument": ("self, request", "self, request, more"),
}


def take(folder: Path, text: str) -> str | None:
    file = folder / "connector.py"
    file.write_text(text)
    installed_source._fingerprint.cache_clear()
    installed_source._parsed.cache_clear()
    return installed_source.fingerprint(file, "Connector.hook")


@pytest.mark.parametrize(("old", "new"), SAME.values(), ids=SAME)
def test_same(tmp_path: Path, old: str, new: str) -> None:
    assert take(tmp_path, FUNCTION) == take(tmp_path, FUNCTION.replace(old, new)) is not None


@pytest.mark.parametrize(("old", "new"), DIFFERENT.values(), ids=DIFFERENT)
def test_different(tmp_path: Path, old: str, new: str) -> None:
    assert take(tmp_path, FUNCTION) != take(tmp_path, FUNCTION.replace(old, new)) is not None


def test_an_inherited_function_has_the_fingerprint_of_its_base(tmp_path: Path) -> None:
    inherits = FUNCTION.replace("class Connector:", "class Base:") + "\n\nclass Connector(Base):\n    pass\n"
    assert take(tmp_path, FUNCTION) == take(tmp_path, inherits) is not None
    own = take(tmp_path, inherits.replace("    pass", "    def hook(self): ..."))
    assert own not in (None, take(tmp_path, FUNCTION))


def test_every_python_computes_the_same(tmp_path: Path, fresh: Fresh) -> None:
    """kvfix ships fingerprints of functions. The user's Python may be another version than kvfix's developers use."""
    file = release("0.3.10").joinpath(*ADAPTER.split(".")).with_suffix(".py")
    (tmp_path / "tricky.py").write_text(FUNCTION)
    functions = {file: "LMCacheConnectorV1Impl.get_num_new_matched_tokens", tmp_path / "tricky.py": "Connector.hook"}
    code = "from kvfix.installed_source import fingerprint; from pathlib import PosixPath;"
    code += f"print(*(fingerprint(*each) for each in {functions}.items()))"
    pythons = filter(shutil.which, (f"python3.{minor}" for minor in range(10, 15)))
    ran = {python: fresh.run([python, "-c", code]) for python in pythons}
    taken = {python: done.stdout for python, done in ran.items() if done.returncode == 0}
    assert len(set(taken.values())) == 1, taken
