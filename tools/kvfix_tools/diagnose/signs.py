"""How a problem shows in a log: a statement, an exception, a native crash or a stack; and whether a line is one."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfix_tools.diagnose.log_line import without_place

if TYPE_CHECKING:
    from kvfix_tools.diagnose.log_line import LogLine

PLACE = re.compile(r"<(\w+)>")
#: Innermost frames in which a sign is looked for.
_FRAMES = 8


#: Where an exception left, or a thread stands: `file.py:function`, `function()`, `folder/` or `namespace::function`.
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


class Logged(NamedTuple):
    """A line of a logger. text: with `<name>` where a value comes; a part of the line is enough."""

    text: str


class Failed(NamedTuple):
    """An exception with its traceback. All that is given must fit.

    kind: its class, without the module. text: as in `Logged`. within: a function among the last frames, `file.py:name`
    or `name`, or a folder: `lmcache/`. through: a part of the path of any frame: whose code called it. source: a part
    of the line of code that raised it.
    """

    kind: str = ""
    text: str = ""
    within: str = ""
    source: str = ""
    through: str = ""


class Died(NamedTuple):
    """A process that died of no exception. text: as in `Logged`. within: a function in faulthandler's stack."""

    text: str = ""
    within: str = ""


class Stuck(NamedTuple):
    """A thread of a process that hangs, in a stack of py-spy's. within: a function among its innermost frames."""

    within: str
    #: As other signs have it: a stack has no text.
    text: str = ""


Sign = Logged | Failed | Died | Stuck


@cache
def parse(sign: str) -> tuple[Sign, ...]:
    """Read a sign as a record writes it. A text without a class or a place is logged or raised: it is two signs."""
    found = _SIGN.fullmatch(sign)
    assert found is not None  # every part may be empty
    form, kind, text, source, within, through = (
        found[part] or "" for part in ("form", "kind", "text", "source", "within", "through")
    )
    within = within.removesuffix("()")
    if form == "stack":
        return (Stuck(within or text),)
    if form == "died":
        return (Died(text, within),)
    raised = Failed(kind, text, within, source, through)
    return (raised,) if kind or source or within or through else (raised, Logged(text))


@lru_cache(maxsize=4096)
def longest(text: str) -> str:
    """The longest part of a template without a value."""
    return max(PLACE.split(text)[::2], key=len)


def _search(template: str, text: str) -> re.Match[str] | None:
    return pattern(template).search(text) if longest(template) in text else None


@lru_cache(maxsize=4096)
def pattern(text: str) -> re.Pattern[str]:
    """Of a template: `<name>` takes a value."""
    parts = PLACE.split(text)
    # A value in between may be a whole CacheEngineKey(...).
    made = [re.escape(part) if number % 2 == 0 else f"(?P<{part}>.{{1,600}}?)" for number, part in enumerate(parts)]
    if len(parts) > 1 and not parts[-1]:
        made[-2] = f"(?P<{parts[-2]}>[^\\n]{{1,200}})"
    return re.compile("".join(made))


def fits(sign: Sign, line: LogLine) -> dict[str, Any] | None:
    """The values of the sign's text in this line; None: it does not show."""
    fields = line.fields
    if isinstance(sign, Logged):
        found = _search(sign.text, without_place(line.body)) if line.name == "logged" else None
        return found.groupdict() if found is not None else None
    if isinstance(sign, Stuck):
        return {} if line.name == "stack" and _within(sign.within, fields["frames"][-4:]) else None
    if isinstance(sign, Died):
        if line.name == "died":
            found = _search(sign.text, line.body.decode("utf-8", "replace")) if not sign.within else None
            return found.groupdict() if found is not None else None
        if line.name != "raised" or not fields.get("fault"):
            return None
        return (
            {} if sign.text in fields["text"] and (not sign.within or _within(sign.within, fields["frames"])) else None
        )
    if line.name != "raised" or fields.get("fault"):
        return None
    if sign.kind and sign.kind != fields["type"]:
        return None
    if sign.source and sign.source not in fields["source"]:
        return None
    own = [frame for frame in fields["frames"] if not frame[0].startswith("<frozen")]  # not of the import system
    if sign.within and not _within(sign.within, own[-_FRAMES:]):
        return None
    if not goes_through(sign, fields["frames"]):
        return None
    found = _search(sign.text, fields["text"]) if sign.text else None
    if sign.text and found is None:
        return None
    return found.groupdict() if found is not None else {}


def goes_through(sign: Failed, frames: list[tuple[str, int, str]]) -> bool:
    """Whether any of the frames is of the code that calls it, if the sign asks for one."""
    return not sign.through or any(sign.through in f"/{frame[0]}" for frame in frames)


def implied(sign: Sign, by: Sign) -> bool:
    """Whether whatever shows `by` shows this sign too: it asks for less."""
    if isinstance(sign, Logged) and isinstance(by, Logged):
        return _search(sign.text, by.text) is not None
    if not (isinstance(sign, Failed) and isinstance(by, Failed)):
        return False
    wider = all(own in ("", more) for own, more in ((sign.kind, by.kind), (sign.through, by.through)))
    # A folder says whose code it is, a text which failure.
    where = by.within.endswith(sign.within) or (sign.within.endswith("/") and bool(by.text))
    return wider and where and longest(sign.text) in by.text and sign.source in by.source


def _within(place: str, frames: list[tuple[str, int, str]]) -> bool:
    if place.endswith("/"):
        return any(f"/{place}" in f"/{frame[0]}" for frame in frames)
    file, _, function = ("", "", place) if "::" in place else place.rpartition(":")
    return any(frame[2] == function and (not file or frame[0].endswith(file)) for frame in frames)
