from pathlib import Path

import pytest

from maintain import language

LONG = f"The scheduler {'really ' * 28}frees blocks."


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("The scheduler frees the blocks. What is left is stored.", '1: a sentence starts with "What"'),
        ("- Of a store the\n  last step counts.", '1: a sentence starts with "Of"'),
        ("The block is free.\n\nThe block is\nfree. Whether it is: unknown.", '4: a sentence starts with "Whether"'),
        (LONG, "1: a sentence of 32 words"),
        ("The scheduler waits.\nThe worker is\nbeside it.", '2: "beside"'),
    ],
)
def test_a_violation_is_found_in_its_line(text: str, wrong: str) -> None:
    (line, message), *others = language.violations(text)
    assert not others
    assert f"{line}: {message}".startswith(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "What does the scheduler do? It frees the blocks.",
        "# What a fix does\n\n| what | Of a table |\n|---|---|\n\n    What a shell prints.\n\n```\nOf code\n```",
        "The scheduler logs `What it frees. Of all blocks, beside the others` and [waits](of.html).",
        f"The scheduler logs `{LONG.replace(' ', chr(10), 9)}`.",
        "<!-- What is made -->",
    ],
)
def test_questions_tables_and_code_are_no_violation(text: str) -> None:
    assert not list(language.violations(text))


def test_files_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "patches/kvfix/fixes/nixl/kvf999.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""A fix."""\n\n\ndef fix():\n    """Whether it is there."""\n')
    (tmp_path / "README.md").write_text("The page.\n")
    monkeypatch.setattr(language, "ROOT", tmp_path)
    assert language.main() == 1
    assert capsys.readouterr().out.startswith('patches/kvfix/fixes/nixl/kvf999.py:5: a sentence starts with "Whether"')
    module.unlink()
    assert language.main() == 0
    assert not capsys.readouterr().out
