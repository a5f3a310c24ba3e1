"""Hides secrets in text that others read: settings, command lines, configuration files, errors, log lines.

It finds them by name (a password, a token, an API key), also in JSON at any depth. It finds them by value, whatever the
name: a URL with a user, an Authorization header, a key in the format of a known service. It hides too much rather than
too little.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "<hidden>"

#: Words in the name of a secret. "tokens" is a count.
_WORDS = {
    "apikey", "auth", "authentication", "authorization", "bearer", "cookie", "credential", "credentials", "dsn",
    "passphrase", "passwd", "password", "pwd", "sas", "secret", "secrets", "signature", "token",
}  # fmt: skip
#: In text "key" more often means the key of a chunk. In the name of a setting it means a secret.
_KEYS = re.compile(r"(?i)(api|access|account|private|secret|signing|ssh|encryption)[-_.]?(access[-_.]?)?key")
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")

#: (pattern of a secret without a name, its replacement)
_VALUES = (
    # A user in a URL. A password may have characters that a URL may not: then hide up to the last @ of the word.
    (
        re.compile(r"""(?i)([a-z0-9+.-]://)(?:[^\s/?#"'<>]*|[^\s/?#"'<>:]*:(?!\d+[/?#])[^\s"'<>]*)@"""),
        rf"\1{HIDDEN}@",
    ),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"), HIDDEN),
    (re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|xox[abprs]-[\w-]{8,}|AKIA[0-9A-Z]{16})"), HIDDEN),
)
#: A name and its value: in JSON, YAML, a query, a repr, or an option of a command. A name starts where a word starts,
#: and a word of any length is read twice at most: a command line may have kilobytes of base64.
_NAMED = re.compile(
    r"(?P<name>\\{0,16}[\"'][\w.-]+\\*[\"']|(?<![\w.-])(?=[\w.-]*?[A-Za-z])[\w.-]+)(?P<is>[ \t]*[=:][ \t]*)"
    r"(?P<value>(?P<quote>\\*[\"'])(?:(?!(?P=quote)).)*(?P=quote)|[^\s,;&\"'})\]]+)"
)


def is_secret(name: str, keys: bool = True) -> bool:
    """Whether the value of this name is a secret. keys: the word "key" is enough."""
    words = {word.lower() for word in _SPLIT.split(name)}
    return bool(words & _WORDS or _KEYS.search(name) or (keys and "key" in words))


def text(words: str) -> str:
    """A text, a line of a log or a whole file, without its secrets."""
    loaded = _json(words)
    if loaded is not None:
        return json.dumps(_walked(loaded), ensure_ascii=False)
    for pattern, shown in _VALUES:
        words = pattern.sub(shown, words)
    return _NAMED.sub(_named, words)


def setting(name: str, value: str) -> str:
    """The value of an environment variable or an option, without its secrets."""
    return HIDDEN if value and is_secret(name) else text(value)


def command(words: Iterable[str]) -> list[str]:
    """A command line without its secrets: an option with the name of a secret loses its whole value."""
    shown: list[str] = []
    hide = False
    for word in words:
        option, equals, value = word.partition("=")
        is_option = option.startswith("-")
        if hide and not is_option:
            shown.append(HIDDEN)
            continue  # an option may have several values
        hide = is_option and not equals and is_secret(option)
        shown.append(f"{option}={setting(option, value)}" if is_option and equals else text(word))
    return shown


def _named(found: re.Match[str]) -> str:
    name = found["name"].strip("\\\"'")
    if not is_secret(name, keys=False) or found["value"].startswith(HIDDEN):
        return found[0]
    quote = found["quote"] or ""
    return f"{found['name']}{found['is']}{quote}{HIDDEN}{quote}"


def _json(words: str) -> Any:
    """The parsed JSON object or list; None if the text is neither."""
    if words.lstrip()[:1] not in ("{", "["):
        return None
    try:
        loaded = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict | list) else None


def _walked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if each and is_secret(name) else _walked(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_walked(each) for each in value]
    return text(value) if isinstance(value, str) else value
