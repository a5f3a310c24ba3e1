"""Remove secrets from the output of the tools: log lines, files, settings, command lines, and JSON at any depth."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from kvfix import redact
from kvfix.redact import HIDDEN, is_secret


def text(words: str) -> str:
    """Return a text without its secrets. The text may be a line of a log or a whole file."""
    if words.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.dumps(_walked(json.loads(words)), ensure_ascii=False)
    return redact.text(words)


def setting(name: str, value: str) -> str:
    """Return the value of an environment variable or an option, without its secrets."""
    return HIDDEN if value and is_secret(name) else text(value)


def command(words: Iterable[str]) -> list[str]:
    """Return a command line without its secrets. If the name of an option suggests a secret, remove the whole value."""
    shown: list[str] = []
    hide = is_first = False
    for word in words:
        option, equals, value = word.partition("=")
        is_option = option.startswith("--" if is_first else "-")  # the first value may be a secret that begins with -
        if hide and not is_option:
            shown.append(HIDDEN)
            is_first = False
            continue  # an option may have several values
        if shown[-1:] in (["-u"], ["--user"]):
            shown += text(f"{shown.pop()} {word}").split(" ", 1)
            continue
        hide = is_first = is_option and not equals and is_secret(option)
        shown.append(f"{option}={setting(option, value)}" if is_option and equals else text(word))
    return shown


def _walked(value: Any) -> Any:
    if isinstance(value, dict):
        named = value.get("name")  # in a Kubernetes manifest, the name of an environment variable
        hides = isinstance(named, str) and is_secret(named)
        return {
            name: HIDDEN if each and (is_secret(name) or (hides and name == "value")) else _walked(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return command(value) if value and all(isinstance(each, str) for each in value) else [*map(_walked, value)]
    return text(value) if isinstance(value, str) else value
