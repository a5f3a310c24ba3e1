import random
import string
from pathlib import Path

import pytest
import tomllib

import kvfix.redact
from kvfix.connector_events.violations import error_text
from kvfix_tools import redact
from kvfix_tools.diagnose import log_line
from tests.diagnose.lines import real

URL, SHOWN = "redis://user:hush@host:6379/0", "redis://<hidden>@host:6379/0"
DATA = tomllib.loads(Path(__file__).with_name("redact.toml").read_text().replace("{-}", "-----"))


@pytest.mark.parametrize(("words", "shown"), DATA["texts"].values(), ids=DATA["texts"])
def test_hidden(words: str, shown: str) -> None:
    found = redact.text(words)
    assert "hush" not in found + kvfix.redact.text(words)
    assert (shown or "<hidden>") in found
    assert redact.text(found) == found


LETTERS = string.ascii_letters + string.digits


def corpus() -> list[tuple[str, str]]:
    """Return pairs (text, secret). Secrets are random. Each of DATA["forms"] makes six pairs with setting names."""
    draw = random.Random(0)

    def letters(count: int, of: str = LETTERS) -> str:
        return "".join(draw.choices(of, k=count))

    found = []
    for prefix in DATA["prefixes"]:
        secret = letters(16, string.ascii_uppercase) if prefix in ("AKIA", "ASIA") else letters(36)
        found.append((f"uses {prefix}{secret} here", secret))
    for at, form in enumerate(DATA["forms"] * 6):
        name = DATA["names"][at % len(DATA["names"])]
        secret = letters(3) + letters(12, LETTERS + "/+._~!@#$%^*|-") + letters(3)
        found.append((form.replace("{n}", name).replace("{s}", secret), secret))
    for form in DATA["nameless"]:
        found += [(form.replace("{s}", secret), secret) for secret in (letters(20), letters(24))]
    for sign in "-,;&)]":
        secret = f"{letters(6)}{sign}{letters(6)}"
        found.append((f"password={secret} and more", secret))
    return found


@pytest.mark.parametrize(("words", "secret"), corpus())
def test_no_part_of_a_secret_is_left(words: str, secret: str) -> None:
    for hide in (redact.text, kvfix.redact.text):
        found = hide(words)
        assert [secret[at : at + 5] for at in range(len(secret) - 4) if secret[at : at + 5] in found] == []
        assert "<hidden>" in found
        assert hide(found) == found


@pytest.mark.parametrize("piece", DATA["pieces"])
def test_a_long_text_ends(piece: str) -> None:
    """Ray passes kilobytes of base64. A pattern that restarts at each letter needs half an hour for base64."""
    redact.text(piece * (500_000 // len(piece)))
    redact.text(f"http://{piece * (500_000 // len(piece))}")


@pytest.mark.parametrize("words", DATA["same"])
def test_other_text_stays_the_same(words: str) -> None:
    assert redact.text(words) == words


@pytest.mark.parametrize("name", ["healthy-0.5.6", "mp-0.5.6.server", "crash-0.3.10"])
def test_a_log_stays_the_same(name: str) -> None:
    lines = real(name).decode(errors="replace").splitlines()
    lines = [line for line in lines if not line.lstrip().startswith(("{", "["))]  # redaction reformats JSON
    assert len(lines) > 50
    assert [line for line in lines if redact.text(line) != line] == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--api-key", "-hush", "--v"], ["serve", "--api-key", "<hidden>", "--v"]),
        (["curl", "-u", "me:hush", "x"], ["curl", "-u", "me:<hidden>", "x"]),
        (["python", "-u", "serve.py", "-v"], ["python", "-u", "serve.py", "-v"]),
        (["serve", "--api-key", "hush", "-v"], ["serve", "--api-key", "<hidden>", "-v"]),
        (["serve", "--api-key=hush"], ["serve", "--api-key=<hidden>"]),
        (["serve", "--api-key", "hush", "hush"], ["serve", "--api-key", "<hidden>", "<hidden>"]),
        (["--max-num-batched-tokens", "128"], ["--max-num-batched-tokens", "128"]),
        (["--remote-url", URL, f"--url={URL}"], ["--remote-url", SHOWN, f"--url={SHOWN}"]),
        (["--hf-overrides", '{"token": "hush"}'], ["--hf-overrides", '{"token": "<hidden>"}']),
        (["--tokenizer", "some/model"], ["--tokenizer", "some/model"]),
    ],
)
def test_command_line(words: list[str], shown: list[str]) -> None:
    assert redact.command(words) == shown


def test_setting() -> None:
    assert redact.setting("LMCACHE_API_KEY", "hush") == "<hidden>"
    assert redact.setting("LMCACHE_REMOTE_URL", URL) == SHOWN
    assert redact.setting("LMCACHE_API_KEY", "") == ""
    assert redact.setting("LMCACHE_CHUNK_SIZE", "64") == "64"


def test_an_error_in_a_dump_and_a_line_in_a_finding() -> None:
    assert error_text(ConnectionError(f"no answer from {URL}")) == f"ConnectionError: no answer from {SHOWN}"
    assert log_line.shown(f"cannot connect to {URL}".encode()) == f"cannot connect to {SHOWN}"
