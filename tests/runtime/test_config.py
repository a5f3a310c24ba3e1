"""The configuration: valid text, and errors with the known names."""

import pytest

from kvfix.config import MODES, Config


@pytest.mark.parametrize(
    "text",
    [
        "fix", "fix only=KVF001", "fix skip=KVF001", "fix only=", "fix only=KVF001 skip=KVF001", "fix plus=KVF017",
        "observe", "observe layers=yes", "strict", "check skip=KVF001", "check only= skip=KVF001 layers=yes",
        "check skip=KVF001 plus=KVF017,KVF111 layers=yes", "check audit=0.001", "strict layers=yes audit=1.0",
    ],
)  # fmt: skip
def test_text_form_survives_a_round_trip(text: str) -> None:
    assert str(Config.parse(text)) == text


def test_slugs_and_any_case_are_valid() -> None:
    assert str(Config("fix", ["lookup-cache-ignores-computed"], None)) == "fix only=KVF001"
    assert str(Config("fix", "kvf001", None)) == "fix only=KVF001"


@pytest.mark.parametrize(
    "text",
    [
        "fixx", "fix KVF001", "fix only=KVF999", "fix only=KVF001 only=KVF001", "fix =", "\0", "fix layers=yes",
        "check layers=no", "fix audit=0.001", "observe audit=1", "check audit=2", "check audit=-1", "check audit=1,2",
        "check audit=some", "check audit=", "check audit=nan", "check audit=0.1 audit=0.1",
    ],
)  # fmt: skip
def test_invalid_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|not understood"):
        Config.parse(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVF999", ""),
        ("lookup-cache-ignore-computed", "did you mean KVF001 (lookup-cache-ignores-computed)? "),
        ("planted", ""),
    ],
)
@pytest.mark.parametrize("argument", ["only", "skip", "plus"])
def test_the_error_for_an_unknown_fix_is_short(name: str, meant: str, argument: str) -> None:
    with pytest.raises(ValueError, match="unknown fix") as raised:
        Config("fix", **{"only": None, "skip": None, argument: [name]})
    assert str(raised.value) == f"unknown fix {name!r}: {meant}`kvfix status --all` lists the known fixes"


def test_a_retired_fix_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert str(Config("fix", None, ["KVF368", "KVF001"])) == "fix skip=KVF001"
    assert "KVF368 is retired and left out: " in caplog.text


def test_all_modes_except_fix_watch_the_hooks() -> None:
    assert [mode for mode in MODES if Config.parse(mode).watches] == ["observe", "check", "strict"]


def test_which_fixes_a_configuration_takes() -> None:
    everything = Config("fix", None, None)
    assert everything.takes("KVF001")
    assert not everything.takes("KVF001", opt_in=True)
    assert Config("fix", ["KVF001"], None).takes("KVF001", opt_in=True)
    assert not Config("fix", [], None).takes("KVF001")
    assert not Config("fix", ["KVF001"], ["KVF001"]).takes("KVF001")
    plus = Config("fix", None, None, plus=["KVF017"])
    assert plus.takes("KVF017", opt_in=True)
    assert plus.takes("KVF001")
    assert not plus.takes("KVF111", opt_in=True)
    assert not Config("fix", ["KVF001"], None, plus=["KVF017"]).takes("KVF002")
    assert not Config("fix", None, ["KVF017"], plus=["KVF017"]).takes("KVF017", opt_in=True)
