"""Secrets are hidden by name and by form, in every format. Other text stays the same."""

from __future__ import annotations

import json

import pytest

from kvfix import redact
from kvfix.connector_events.violations import error_text
from kvfix_tools.diagnose import log_line

URL, SHOWN = "redis://user:hush@host:6379/0", "redis://<hidden>@host:6379/0"

TEXTS = {
    "a URL": (URL, SHOWN),
    "only a password": ("rediss://:hush@host", "rediss://<hidden>@host"),
    "only a user": ("https://hush@host/path", "https://<hidden>@host/path"),
    "a password with characters that a URL may not have": ("redis://user:hu/sh@hush@host", "redis://<hidden>@host"),
    "several in a line": (f"from {URL}, {URL}", f"from {SHOWN}, {SHOWN}"),
    "JSON": ('{"a": [{"b": {"password": "hush", "c": 1}}]}', '{"a": [{"b": {"password": "<hidden>", "c": 1}}]}'),
    "JSON in JSON": (
        json.dumps({"extra": json.dumps({"remote_url": URL, "apiKey": "hush"})}),
        json.dumps({"extra": json.dumps({"remote_url": SHOWN, "apiKey": "<hidden>"})}),
    ),
    "a number, a list": ('{"secret": 123, "tokens": 1, "auth": ["hush"]}', None),
    "YAML": (f"chunk_size: 256\nremote_url: {URL}\npassword: hush\n", f"chunk_size: 256\nremote_url: {SHOWN}\n"),
    "a log's repr of a configuration": (
        f"LMCache Configuration: {{'remote_url': '{URL}', 'extra_config': {{'s3_secret_access_key': 'hu sh'}}}}",
        f"'remote_url': '{SHOWN}', 'extra_config': {{'s3_secret_access_key': '<hidden>'}}",
    ),
    "JSON within a log line": ('got {"api_key": "hush", "x": 1} from', 'got {"api_key": "<hidden>", "x": 1} from'),
    "escaped JSON within a log line": (r"{\"password\": \"hush\"} x", r"{\"password\": \"<hidden>\"} x"),
    "a URL behind a long word": (f"{'x' * 60}{URL}", SHOWN),
    "a name behind a value that ends in a backslash": (r"a=1\"password\": \"hush\"", r"\"password\": \"<hidden>\""),
    "a query": ("GET /x?sig=1&access_token=hush&n=2", "access_token=<hidden>&n=2"),
    "a header": ("Authorization: Bearer hush.hush.hush", None),
    "a key of a service": ("with hf_hushhushhushhushhush and sk-hushhushhushhushhush", "with <hidden> and <hidden>"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nhush\n-----END RSA PRIVATE KEY----- end", " end"),
    "a private key that is cut off": ("-----BEGIN PRIVATE KEY-----\nhush", None),
}
SAME = [
    "tcp://localhost:5699",
    "http://host:8000/v1/models@latest",
    "Reqid: cmpl-1, Total tokens 512, LMCache hit tokens: 256, need to load: 256",
    "key: vllm@model@1@0@5ab3, tokens: 12, max_num_batched_tokens=128",
    '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
    "AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache)",
]


@pytest.mark.parametrize(("words", "shown"), TEXTS.values(), ids=TEXTS)
def test_hidden(words: str, shown: str | None) -> None:
    found = redact.text(words)
    assert "hush" not in found
    assert (shown or "<hidden>") in found
    assert redact.text(found) == found


@pytest.mark.parametrize("piece", ["eyJhdX", "a-", "1.", "\\", "a=", "a://", "'a", '"a":', "bearer ", "sk-"])
def test_a_long_word_ends(piece: str) -> None:
    """Ray passes its configuration as kilobytes of base64. A pattern that reads a word again at each letter takes
    minutes for one such word."""
    redact.text(piece * (20_000 // len(piece)))


@pytest.mark.parametrize("words", SAME)
def test_other_text_stays_the_same(words: str) -> None:
    assert redact.text(words) == words


@pytest.mark.parametrize(
    ("words", "shown"),
    [
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
    assert error_text(ConnectionError(f"Error 111 connecting to {URL}")) == (
        f"ConnectionError: Error 111 connecting to {SHOWN}"
    )
    assert log_line.shown(f"cannot connect to {URL}".encode()) == f"cannot connect to {SHOWN}"
