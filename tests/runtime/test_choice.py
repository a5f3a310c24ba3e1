"""The choice: what a user may write, and what is refused with the known names."""

import pytest

from kvfix.choice import MODES, Choice, known_fixes


@pytest.mark.parametrize(
    "text",
    [
        "fix",
        "fix only=KVF001",
        "fix skip=KVF001",
        "fix only=",
        "fix only=KVF001 skip=KVF001",
        "observe",
        "check skip=KVF001",
        "strict",
        "observe layers=yes",
        "check only= skip=KVF001 layers=yes",
    ],
)
def test_text_form_survives_a_round_trip(text: str) -> None:
    assert str(Choice.parse(text)) == text


def test_slugs_and_any_case_are_understood() -> None:
    assert str(Choice.make("fix", ["lookup-cache-ignores-computed"], None)) == "fix only=KVF001"
    assert str(Choice.make("fix", "kvf001", None)) == "fix only=KVF001"


@pytest.mark.parametrize(
    "text",
    [
        "fixx",
        "fix KVF001",
        "fix only=KVF999",
        "fix only=KVF001 only=KVF001",
        "fix =",
        "\0",
        "fix layers=yes",
        "check layers=no",
    ],
)
def test_nonsense_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|not understood"):
        Choice.parse(text)


def test_an_unknown_fix_is_answered_with_all_known_ones() -> None:
    with pytest.raises(ValueError, match="KVF999") as raised:
        Choice.make("fix", ["KVF999"], None)
    for code, slug in known_fixes().items():
        assert f"{code} ({slug})" in str(raised.value)


def test_only_modes_beyond_fix_have_probes() -> None:
    assert [mode for mode in MODES if Choice.parse(mode).probes] == ["observe", "check", "strict"]


def test_what_a_choice_takes() -> None:
    everything = Choice.make("fix", None, None)
    assert everything.takes("KVF001")
    assert not everything.takes("KVF001", opt_in=True)
    assert Choice.make("fix", ["KVF001"], None).takes("KVF001", opt_in=True)
    assert not Choice.make("fix", [], None).takes("KVF001")
    assert not Choice.make("fix", ["KVF001"], ["KVF001"]).takes("KVF001")
