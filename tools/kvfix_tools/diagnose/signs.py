"""Match lines of a log with the signs of known problems: a log text, an exception, a native crash or a stack."""

import re
from functools import cache, lru_cache
from typing import Any, NamedTuple

from kvfix_tools.diagnose.log_line import LogLine, without_place

PLACE = re.compile(r"<(\w+)>")
#: {form of a sign: number of innermost frames that may have the place `within`; 0: all frames}
_FRAMES = {"raised": 8, "stack": 4, "died": 0}
#: A place in a stack: `file.py:function`, `function()`, `folder/` or `namespace::function`.
_PLACE = r"[\w./-]+\.\w+:[\w<>]+|[\w<>~]+\(\)|[\w./-]+/|[^\s`]+::[^\s`]+"
#: The grammar of a sign (docs/knowledge.md).
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
    """The description of a line that shows a problem. All given parts must match the line.

    form: `logged`: a line of a logger. `raised`: an exception. `died`: a process that died without an exception, or
        faulthandler's stack of this process. `stack`: a thread of a hung process.
    kind: the class of the exception, without the module. text: a part of the line. `<name>` in it matches a value.
    within: a function among the last frames (`file.py:name` or `name`), or a folder (`lmcache/`).
    source: a part of the line of code that raised the exception. through: a part of the path of any frame.
    """

    form: str
    kind: str = ""
    text: str = ""
    within: str = ""
    source: str = ""
    through: str = ""


@cache
def parse(sign: str) -> tuple[Sign, ...]:
    """Parse a sign of a record. A text without a class or a place gives two signs: of form `raised` and `logged`."""
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
    """Return the longest fixed part of a template, which is the text between its values."""
    return max(PLACE.split(text)[::2], key=len)


def _search(template: str, text: str) -> re.Match[str] | None:
    return pattern(template).search(text) if longest(template) in text else None


@lru_cache(maxsize=4096)
def pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a template, in which `<name>` matches a value."""
    parts = PLACE.split(text)
    # A value may be as long as the text CacheEngineKey(...) of LMCache.
    made = [re.escape(part) if number % 2 == 0 else f"(?P<{part}>.{{1,600}}?)" for number, part in enumerate(parts)]
    if len(parts) > 1 and not parts[-1]:
        made[-2] = f"(?P<{parts[-2]}>[^\\n]{{1,200}})"
    return re.compile("".join(made))


def fits(sign: Sign, line: LogLine) -> dict[str, Any] | None:
    """Return {name: value} of the sign's values in this line; None if the line does not fit the sign."""
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
    """Return True if every line that fits the sign `by` also fits this sign."""
    if sign.form != by.form or sign.form not in ("logged", "raised"):
        return False
    if sign.form == "logged":
        return _search(sign.text, by.text) is not None
    wider = all(own in ("", more) for own, more in ((sign.kind, by.kind), (sign.through, by.through)))
    # A sign with a text is more specific than a sign that names only the folder of a package.
    where = by.within.endswith(sign.within) or (sign.within.endswith("/") and bool(by.text))
    return wider and where and longest(sign.text) in by.text and sign.source in by.source


def _within(place: str, frames: list[tuple[str, int, str]], most: int) -> bool:
    """Return True if a frame is at this place. most: as in _FRAMES, without frames of Python's import system."""
    if place.endswith("/"):
        found = [frame for frame in frames if f"/{place}" in f"/{frame[0]}"]
    else:
        file, _, function = ("", "", place) if "::" in place else place.rpartition(":")
        found = [frame for frame in frames if frame[2] == function and frame[0].endswith(file)]
    if not (found and most):
        return bool(found)
    own = [frame for frame in frames if not frame[0].startswith("<frozen")]
    return any(frame in own[-most:] for frame in found)
