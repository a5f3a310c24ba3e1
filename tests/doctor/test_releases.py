"""Test which wrong imports and calls doctor reports for two small packages. test_planted.py tests real releases."""

from pathlib import Path

import pytest

from kvfix_tools.doctor import fit
from kvfix_tools.doctor.packages import Package


def write(folder: Path, **modules: str) -> Package:
    """Write a package with these modules. The name `sub__mod` stands for sub/mod.py."""
    for name, text in modules.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    (folder / "__init__.py").touch()
    return Package(folder.name, folder, "1", ())


THEIRS = {
    "things": "import os\nVALUE = 1\ndef function(a, b=1, *, c=2): ...\n"
    "class Taking:\n    def __init__(self, a, *rest): ...\n",
    "records": "from dataclasses import dataclass\n@dataclass\nclass Record:\n    a: int\n    b: int = 2\n",
}
#: {code of package `ours`, which uses package `theirs`: part of doctor's report}. "" means no report.
CASES = {
    "from theirs.things import VALUE, function, os": "",
    "from theirs.things import gone": "cannot import name 'gone' from 'theirs.things'",
    "from theirs import things": "",
    "import theirs.gone": "No module named 'theirs.gone'",
    "try:\n    from theirs.things import gone\nexcept ImportError:\n    gone = None": "",
    "try:\n    from theirs.gone import x\nexcept (OSError, ImportError):\n    from theirs.things import y": "name 'y'",
    "try:\n    from theirs.things import gone\nexcept ImportError:\n    raise": "cannot import name 'gone'",
    "try:\n    from theirs.things import gone\nexcept KeyError:\n    pass": "cannot import name 'gone'",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from theirs.things import gone": "",
    "def later():\n    from theirs.things import gone": "",
    "class Connector:\n    def __init__(self):\n        from theirs.things import gone": "cannot import name 'gone'",
    "from theirs.things import function\nfunction(1, 2, c=3)": "",
    "from theirs.things import function\nfunction(1, d=3)": "function() got an unexpected keyword argument 'd'",
    "from theirs.things import function\nfunction(1, 2, 3)": "function() too many positional arguments",
    "from theirs.things import function as other\nother(b=1)": "function() missing a required argument: 'a'",
    "from theirs.things import function\nfunction(*x, **y)": "",
    "from theirs.things import Taking\nTaking(1, 2, 3, 4)": "",
    "from theirs.records import Record\nRecord(1, c=2)": "Record() got an unexpected keyword argument 'c'",
    "from theirs.records import Record\nRecord(1, b=2)": "",
}


@pytest.mark.parametrize("code", CASES)
def test_what_fits_and_what_does_not(code: str, tmp_path: Path) -> None:
    theirs = write(tmp_path / "theirs", **THEIRS)
    found = fit.misfits((write(tmp_path / "ours", connector=code), "ours.connector"), theirs)
    assert bool(found) == bool(CASES[code]), found
    assert all(CASES[code] in each.what and each.where.startswith("ours/connector.py:") for each in found)


def test_what_is_imported_on_the_way_counts(tmp_path: Path) -> None:
    theirs = write(tmp_path / "theirs", **THEIRS)
    ours = write(tmp_path / "ours", connector="from ours.sub.mod import x", sub__mod="from theirs.things import gone")
    assert [each.where for each in fit.misfits((ours, "ours.connector"), theirs)] == ["ours/sub/mod.py:1"]
