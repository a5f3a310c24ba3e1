"""Match log lines with the signs of known problems. A sign is a log text, an exception, a native crash or a stack."""

import re
from functools import cache, lru_cache
from typing import Any, NamedTuple

from kvfix_tools.diagnose.log_line import LogLine, without_place

PLACE = re.compile(r"<(\w+)>")
#: For each form of a sign, the number of innermost frames in which kvfix searches for `within`. 0 means all frames.
_FRAMES = {"raised": 8, "stack": 4, "died": 0}
#: A place in a stack is `file.py:function`, `function()`, `folder/` or `namespace::function`.
_PLACE = r"[\w./-]+\.\w+:[\w<>]+|[\w<>~]+\(\)|[\w./-]+/|[^\s`]+::[^\s`]+"
#: The syntax of a sign, which docs/knowledge.md describes.
_SIGN = re.compile(
    r"(?:(?P<form>died|stack): )?"
    r"(?:(?P<kind>(?:[A-Z]\w*?|nixl\w+?)?(?:Error|Exception|Timeout|StopIteration|Disconnected))"
    rf"(?:: |(?=$| at `| via | in (?:{_PLACE})(?:$| via ))))?"
    r"(?P<text>.*?)"
    r"(?: ?(?<!\S)at `(?P<source>[^`]+)`)?"
    rf"(?: ?(?<!\S)in (?P<within>{_PLACE}))?"
    r"(?: via (?P<through>[\w./-]+))?"
)


class Sign(NamedTuple):
    """A description of lines that show a problem. A line fits if it matches all non-empty parts.

    form: `logged` is a logger's line, `raised` is an exception, and `stack` is a thread of a hung process. `died` is a
        process that ended without an exception, or a stack that faulthandler printed when the process ended.
    kind: the class of the exception, without the module. text: a part of the line. `<name>` stands for any value.
    within: a function among the innermost frames (`file.py:name` or `name`), or a folder (`lmcache/`).
    source: a part of the source line that raised the exception. through: a part of the path of any frame.
    """

    form: str
    kind: str = ""
    text: str = ""
    within: str = ""
    source: str = ""
    through: str = ""


@cache
def parse(sign: str) -> tuple[Sign, ...]:
    """Parse one sign of a known problem. A sign that is only a text gives two signs, one `raised` and one `logged`."""
    found = _SIGN.fullmatch(sign)
    assert found is not None  # the pattern matches any text, because every part may be empty
    parts = {name: value or "" for name, value in found.groupdict().items()}
    parts["within"] = parts["within"].removesuffix("()")
    form, text = parts.pop("form"), parts["text"]
    if form == "stack":
        return (Sign("stack", within=parts["within"] or text),)
    if form == "died":
        return (Sign(**parts, form="died"),)
    raised = Sign(**parts, form="raised")
    return (raised, Sign("logged", text=text)) if raised == Sign("raised", text=text) else (raised,)


@lru_cache(maxsize=4096)
def longest(text: str) -> str:
    """Return the longest part of a template between its placeholders (`<name>`)."""
    return max(PLACE.split(text)[::2], key=len)


def _search(template: str, text: str) -> re.Match[str] | None:
    return pattern(template).search(text) if longest(template) in text else None


@lru_cache(maxsize=4096)
def pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression for a template, in which `<name>` matches a value."""
    parts = PLACE.split(text)
    # A value may be as long as LMCache's text `CacheEngineKey(...)`.
    made = [re.escape(part) if number % 2 == 0 else f"(?P<{part}>.{{1,600}}?)" for number, part in enumerate(parts)]
    if len(parts) > 1 and not parts[-1]:
        made[-2] = f"(?P<{parts[-2]}>[^\\n]{{1,200}})"
    return re.compile("".join(made))


def fits(sign: Sign, line: LogLine) -> dict[str, Any] | None:
    """Return {placeholder of the sign: its value in this line}, or None if the line does not fit the sign."""
    fields = line.fields
    form = "died" if line.name == "raised" and fields.get("fault") else line.name
    if sign.form != form or (line.name == "died" and sign.within):
        return None
    if line.name == "raised":
        text = fields["text"]
    else:
        text = without_place(line.body) if line.name == "logged" else line.body.decode("utf-8", "replace")
    if (sign.kind and sign.kind != fields["type"]) or (sign.source and sign.source not in fields["source"]):
        return None
    found = _search(sign.text, text)
    if found is None:
        return None
    if sign.through and not any(sign.through in f"/{frame[0]}" for frame in fields["frames"]):
        return None
    if sign.within and not _within(sign.within, fields["frames"], _FRAMES[sign.form]):
        return None
    return found.groupdict()


def implied(sign: Sign, by: Sign) -> bool:
    """Compare the parts of two signs. Return True if the sign `by` is at least as specific as `sign`."""
    if sign.form != by.form or sign.form not in ("logged", "raised"):
        return False
    if sign.form == "logged":
        return _search(sign.text, by.text) is not None
    wider = all(own in ("", more) for own, more in ((sign.kind, by.kind), (sign.through, by.through)))
    # A sign with a text is more specific than a sign with only a package's folder.
    where = by.within.endswith(sign.within) or (sign.within.endswith("/") and bool(by.text))
    return wider and where and longest(sign.text) in by.text and sign.source in by.source


def _within(place: str, frames: list[tuple[str, int, str]], most: int) -> bool:
    """Return True if one of the `most` innermost frames is at this place. Ignore frames of Python's import system."""
    if place.endswith("/"):
        found = [frame for frame in frames if f"/{place}" in f"/{frame[0]}"]
    else:
        file, _, function = ("", "", place) if "::" in place else place.rpartition(":")
        found = [frame for frame in frames if frame[2] == function and frame[0].endswith(file)]
    if not (found and most):
        return bool(found)
    own = [frame for frame in frames if not frame[0].startswith("<frozen")]
    return any(frame in own[-most:] for frame in found)
