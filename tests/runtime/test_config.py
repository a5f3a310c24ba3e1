import pytest

from kvfix.config import Config


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


@pytest.mark.parametrize("only", [["lookup-cache-ignores-computed"], "kvf001"])
def test_slugs_and_any_case_are_valid(only: list[str] | str) -> None:
    assert str(Config("fix", only, None)) == "fix only=KVF001"


@pytest.mark.parametrize(
    "text",
    [
        "fixx", "fix KVF001", "fix only=KVF999", "fix only=KVF001 only=KVF001", "fix =", "\0", "fix layers=yes",
        "check layers=no", "fix audit=0.001", "observe audit=1", "check audit=2", "check audit=-1", "check audit=1,2",
        "check audit=some", "check audit=", "check audit=nan", "check audit=0.1 audit=0.1",
    ],
)  # fmt: skip
def test_invalid_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|so (layers|audit) needs mode|not understood"):
        Config.parse(text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("KVF999", ""), ("lookup-cache-ignore-computed", "did you mean KVF001 (lookup-cache-ignores-computed)? ")],
)
@pytest.mark.parametrize("argument", ["only", "skip", "plus"])
def test_the_error_for_an_unknown_fix_is_short(name: str, meant: str, argument: str) -> None:
    with pytest.raises(ValueError, match="unknown fix") as raised:
        Config("fix", **{"only": None, "skip": None, argument: [name]})
    assert str(raised.value) == f"unknown fix {name!r}: {meant}`kvfix status --all` lists the known fixes"


def test_a_retired_fix_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert str(Config("fix", None, ["KVF368", "KVF001"])) == "fix skip=KVF001"
    assert "KVF368 is retired and left out: " in caplog.text


@pytest.mark.parametrize(
    ("text", "code", "takes", "takes_opt_in"),
    [
        ("fix", "KVF001", True, False),
        ("fix only=KVF001", "KVF001", True, True),
        ("fix only=", "KVF001", False, False),
        ("fix only=KVF001 skip=KVF001", "KVF001", False, False),
        ("fix plus=KVF017", "KVF017", True, True),
        ("fix plus=KVF017", "KVF111", True, False),
        ("fix only=KVF001 plus=KVF017", "KVF002", False, False),
        ("fix skip=KVF017 plus=KVF017", "KVF017", False, False),
    ],
)
def test_which_fixes_a_configuration_takes(text: str, code: str, takes: bool, takes_opt_in: bool) -> None:
    config = Config.parse(text)
    assert (config.takes(code), config.takes(code, opt_in=True)) == (takes, takes_opt_in)
