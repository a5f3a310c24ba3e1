"""Secrets are hidden by name and by form, in every format. Other text stays the same."""

import gzip
import json
import random
import string
from pathlib import Path

import pytest

import kvfix.redact
from kvfix.connector_events.violations import error_text
from kvfix_tools import redact
from kvfix_tools.diagnose import log_line

URL, SHOWN = "redis://user:hush@host:6379/0", "redis://<hidden>@host:6379/0"

TEXTS = {
    "a URL": (URL, SHOWN),
    "only a user": ("https://hush@host/path", "https://<hidden>@host/path"),
    "a password with characters that a URL may not have": ("redis://user:hu/sh@hush@host", "redis://<hidden>@host"),
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
    "a URL behind a long word": (f"{'x' * 60}{URL}", SHOWN),
    "a name behind a value that ends in a backslash": (r"a=1\"password\": \"hush\"", r"\"password\": \"<hidden>\""),
}
SAME = [
    "tcp://localhost:5699",
    "http://host:8000/v1/models@latest",
    "Reqid: cmpl-1, Total tokens 512, LMCache hit tokens: 256, need to load: 256",
    "key: vllm@model@1@0@5ab3, tokens: 12, max_num_batched_tokens=128",
    '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
    "AssertionError: Mismatch in tokens to load: 256 vs 256 (tokens in lmcache)",
    "(token_database.py:164:lmcache.v1.token_database)",
    "prompt_token_ids: [1, 2, 3], eos_token_id=7",
    "python -u serve.py, connects to tcp://host:5555 and http://[::1]:8000/v1",
    "task-1234567890abcdefgh, disk-1234567890abcdefgh, mask-1234567890abcdefgh",
]
LOGS = Path(__file__).parents[1] / "diagnose/logs"


@pytest.mark.parametrize(("words", "shown"), TEXTS.values(), ids=TEXTS)
def test_hidden(words: str, shown: str | None) -> None:
    found = redact.text(words)
    assert "hush" not in found + kvfix.redact.text(words)
    assert (shown or "<hidden>") in found
    assert redact.text(found) == found


#: Prefixes of the keys of services, without a secret behind them.
PREFIXES = [
    "hf_", "api_org_", "sk-", "sk-proj-", "sk-ant-api03-", "sk-svcacct-", "sk_live_", "sk_test_", "rk_live_",
    "pk_live_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "gldt-", "glrt-", "glptt-",
    "glsoat-", "glcbt-", "glft-", "xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-", "xoxe-", "xapp-", "ya29.", "npm_",
    "pypi-", "dop_v1_", "doo_v1_", "dor_v1_", "SG.", "nvapi-", "xai-", "gsk_", "pplx-", "tgp_v1_", "lsv2_pt_",
    "lsv2_sk_", "hvs.", "hvb.", "hvr.", "dp.pt.", "dp.st.", "pscale_tkn_", "pscale_pw_", "tskey-", "pul-", "PMAK-",
    "NRAK-", "dckr_pat_", "rubygems_", "sbp_", "glsa_", "glc_", "sntrys_", "sntryu_", "ATATT3", "shpat_", "shpca_",
    "shppa_", "shpss_", "sq0atp-", "sq0csp-", "lin_api_", "ntn_", "AGE-SECRET-KEY-1", "AIza", "AKIA", "ASIA", "dapi",
    "r8_", "key-", "12345678:AA",
]  # fmt: skip
#: Names of settings, headers and fields with a secret.
NAMES = [
    "password", "passwd", "pwd", "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "redis_password", "s3_secret_access_key",
    "API_KEY", "apiKey", "x-api-key", "OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "client_secret", "AWS_SESSION_TOKEN", "access_token", "refreshToken", "AccountKey", "SharedAccessKey",
    "private_key", "secretKey", "signing-key", "encryption_key", "master_key", "passphrase", "credentials", "Cookie",
    "Authorization", "accesstoken",
]  # fmt: skip
#: Ways to write a name and its value: `{n}` and `{s}`.
FORMS = [
    "{n}={s}", "export {n}='{s}'", "a: 1\n  {n}: {s}\n", "INFO 11-28 using {n}={s}, size=3",
    "config: {{'size': 3, '{n}': '{s}'}}", '{{"a": [{{"{n}": "{s}"}}]}}', 'got {{\\"{n}\\": \\"{s}\\"}}',
    'os.environ["{n}"] = "{s}"', "vllm serve m --{n} {s} --port 1", "vllm serve m --{n}={s} --port 1",
    "argv: ['serve', '--{n}', '{s}']", "<{n}>{s}</{n}>", "- name: {n}\n  value: {s}\n", "GET /v1?{n}={s}&n=2",
    "env={n}={s}",
]  # fmt: skip
#: Secrets without a name.
NAMELESS = [
    "connect to redis://user:{s}@host:6379/0", "rediss://:{s}@host", "postgres://u:{s}@a:1/b,postgres://v:x@c:1/d",
    "Authorization: Token {s}", "sent Bearer {s}", 'curl -H "Authorization: Basic {s}" http://host',
    "Proxy-Authorization: Custom id=1 {s}", "Cookie: a=1; session={s}; b=2", "curl -u admin:{s} http://host",
    "with eyJhbGciOiJI.eyJzdWIiOi{s}.{s} for", "https://a.blob/b?sv=1&sig={s}&se=2",
    "?X-Amz-Credential={s}/20260101&X-Amz-Signature={s}", "Server=a;Uid=b;Password={s};Encrypt=yes",
    "-----BEGIN " + "EC PRIVATE KEY-----\\n{s}\\n-----END " + "EC PRIVATE KEY-----",
    "-----BEGIN " + "PGP PRIVATE KEY BLOCK-----\n{s}\n", "X-Api-Key {s}", "auth: ['user', '{s}']",
    'password = "a \\" {s}" rest', "secret: first, {s}",
]  # fmt: skip
LETTERS = string.ascii_letters + string.digits
SIGNS = "/+._~!@#$%^*|-"


def corpus() -> list[tuple[str, str]]:
    """(text, secret), of random letters. Each name stands in some forms, and each form has several names."""
    draw = random.Random(0)

    def letters(count: int, of: str = LETTERS) -> str:
        return "".join(draw.choices(of, k=count))

    found = []
    for prefix in PREFIXES:
        secret = letters(16, string.ascii_uppercase) if prefix in ("AKIA", "ASIA") else letters(36)
        found.append((f"uses {prefix}{secret} here", secret))
    for at, form in enumerate(FORMS * 6):
        name = NAMES[at % len(NAMES)]
        secret = letters(3) + letters(12, LETTERS + SIGNS) + letters(3)
        found.append((form.format(n=name, s=secret), secret))
    for form in NAMELESS:
        found += [(form.format(s=secret), secret) for secret in (letters(20), letters(24))]
    for sign in "-,;&)]":
        secret = f"{letters(6)}{sign}{letters(6)}"
        found.append((f"password={secret} and more", secret))
    return found


@pytest.mark.parametrize(("words", "secret"), corpus())
def test_no_part_of_a_secret_is_left(words: str, secret: str) -> None:
    """The tools and the engine hide all of it. The engine does not parse JSON."""
    for hide in (redact.text, kvfix.redact.text):
        found = hide(words)
        assert [secret[at : at + 5] for at in range(len(secret) - 4) if secret[at : at + 5] in found] == []
        assert "<hidden>" in found
        assert hide(found) == found


#: Texts that begin a secret, but do not complete one.
PIECES = [
    "eyJhdX", "eyJaaaaaaaa.", "a-", "1.", "\\", "a=", "a://", "x:", "@", "'a", '"a":', "bearer ", "sk-", "-a", ".-a",
    "--token ", "password='", 'password=\\"', "name: a ", "<a", "<token>", "-u ", "a=[", "a,", "a=b,", "?sig=", " ",
    "\t=", "\n- ", "X-a", "-----BEGIN ", "-----BEGIN A PRIVATE KEY", "key-", "1234567:AA",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_text_ends(piece: str) -> None:
    """Ray passes its configuration as kilobytes of base64, and a client's text may be in an error. A pattern that
    reads a word again at each letter takes half an hour for this text."""
    redact.text(piece * (500_000 // len(piece)))
    redact.text(f"http://{piece * (500_000 // len(piece))}")


@pytest.mark.parametrize("words", SAME)
def test_other_text_stays_the_same(words: str) -> None:
    assert redact.text(words) == words


@pytest.mark.parametrize("name", ["healthy-0.5.6.log.gz", "mp-0.5.6.server.log.gz", "crash-0.3.10.log.gz"])
def test_a_log_stays_the_same(name: str) -> None:
    lines = gzip.decompress((LOGS / name).read_bytes()).decode(errors="replace").splitlines()
    lines = [line for line in lines if not line.lstrip().startswith(("{", "["))]  # JSON is formatted anew
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
    assert error_text(ConnectionError(f"Error 111 connecting to {URL}")) == (
        f"ConnectionError: Error 111 connecting to {SHOWN}"
    )
    assert log_line.shown(f"cannot connect to {URL}".encode()) == f"cannot connect to {SHOWN}"
