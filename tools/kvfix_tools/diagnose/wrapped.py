"""Lines that a terminal has wrapped, in one again: by its width, or by what a line lacks and the next one has."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

#: What a line of a log begins with; a piece that a terminal cut off does not.
BEGINS = re.compile(
    rb"(?:\s{0,8}\d{1,6}[.:)]? {1,4})?"  # a number of a list, or of a viewer
    rb"(?:\x1b\[[0-9;]*m)*(?:\(\w+ [^)]*pid=|\[\d{4}-|\[pod/|\d{4}-\d\d-\d\d"
    rb"|(?:[A-Z]{3,8} )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"
    rb"|command terminated|Killed|Aborted|Segmentation fault|terminate called"
    rb"|Traceback |  File |\{|(?:assert|raise|return) |[A-Z][a-z]{2} [ \d]\d \d\d:|[IWEF](?:\d{4}){1,2} "
    rb"|(?:Value|Runtime|Assertion|Key|Index|Type|Attribute|Import|ModuleNotFound|FileNotFound|Permission|OS|Memory"
    rb"|Timeout|Connection|NotImplemented)Error\b)"
)
#: Of the marks that Python puts below what raised, and of blank lines.
_MARKS = frozenset(b" ~^")
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
#: A terminal is at least so wide, and at most.
NARROWEST, _WIDEST = 40, 400
#: A line of LMCache's, which ends with the place of its statement; that place.
_LMCACHE, _ENDS = re.compile(rb"\] LMCache [A-Z]{4,8}: "), re.compile(rb"\(\w+\.py:\d+:[\w.]+\)\s*$")
#: A frame of a traceback that ends before its function, and one that is whole.
_FRAME = re.compile(
    rb'File "[^"\n]{1,400}(?:"(?:,(?: (?:l(?:i(?:n(?:e(?: (?:\d+(?:,(?: (?:in?)?)?)?)?)?)?)?)?)?)?)?)?\s*$'
)
_WHOLE_FRAME = re.compile(rb'File "[^"\n]{1,400}", line \d+, in (?:<\w+>|\w+)\s*$')
_NAME = re.compile(rb"\w+")
#: What vLLM puts in front of each line of what it logs, behind the name of a process.
_HEAD = re.compile(
    rb"\(\w+[^()\n]{0,60}pid=\d+[^()\n]{0,40}\) [A-Z]{4,8} [\d-]{5,10} [\d:]{8} \[[^\[\]\s]{1,80}:\d+\] "
)
#: An exception whose name begins with a small letter: of a module, or of C's.
_EXCEPTION = re.compile(rb"(?:(?:[a-z_]\w*\.)+|[a-z]+[A-Z])\w*(?:Error|Exception)(?::|\s*$)")
#: The message of a panic of Rust's stands in the lines below.
_PANICS = re.compile(rb"( panicked at [^\s:]{1,300}:\d+:\d+:)\n(?!note: |stack backtrace)([^\n]+)")


class Plain(NamedTuple):
    """numbers: of each line in the input; None: they follow one another."""

    text: bytes
    numbers: list[int] | None = None


def shape(prefix: bytes) -> bytes:
    """What stands in front of a line, with any digits: a launcher's are others in each."""
    return prefix.translate(_ANY_DIGIT)


def panics(block: bytes) -> bytes:
    """With the message of a panic in its first line; an empty one takes its place."""
    return _PANICS.sub(rb"\1 \2\n", block)


def joined(block: bytes) -> Plain:
    """The block without its terminal's breaks."""
    lines = block.split(b"\n")
    width = _width(lines)
    lacking = {number for number in range(len(lines) - 1) if _lacks(lines, number)}
    if not width and not lacking:
        return Plain(block)
    found: list[bytes] = []
    numbers: list[int] = []
    continued = False
    for number, line in enumerate(lines):
        if continued and line and not BEGINS.match(line):
            found[-1] += line
        else:
            found.append(line)
            numbers.append(number)
        continued = len(line) == width or number in lacking
    return Plain(b"\n".join(found), numbers)


def _lacks(lines: list[bytes], number: int) -> bool:
    """Whether this line lacks its end, and the next one has it."""
    line, there = lines[number : number + 2]
    if len(line) < NARROWEST or not there or BEGINS.match(there):
        return False
    if _LMCACHE.search(line):
        return not _ENDS.search(line) and _ENDS.search(there) is not None and not _LMCACHE.search(there)
    return b'File "' in line and _FRAME.search(line) is not None and b", in " in (line + there)[line.find(b'File "') :]


def _width(lines: list[bytes]) -> int:
    """The width at which a terminal has cut lines; 0: it has not."""
    longest = max(map(len, lines))
    if not NARROWEST <= longest <= _WIDEST:
        return 0
    at = [number for number, line in enumerate(lines[:-1]) if len(line) == longest]
    # Marks below a line of source end where it ends.
    plain = [number for number in at if not any(set(line) <= _MARKS for line in lines[number : number + 2])]
    cut = [number for number in plain if not BEGINS.match(lines[number + 1])]
    # One line may be the longest by chance; with several, or where a word goes on in the next line, it is cut.
    lengths = Counter(map(len, lines))
    return longest if cut and (len(cut) >= 2 or (lengths[longest] == 1 and _goes_on(lines, cut[0]))) else 0


def _goes_on(lines: list[bytes], number: int) -> bool:
    here, there = lines[number][-1:], lines[number + 1][:1]
    first, second = (shape(line.partition(b" ")[0]) for line in lines[number : number + 2])
    if first and first == second:
        return False  # the same prefix of a launcher, or its clock: two lines
    if _WHOLE_FRAME.search(lines[number]) and not _NAME.fullmatch(lines[number + 1]):
        return False
    word = lines[number].rpartition(b" ")[2]
    if _EXCEPTION.match(lines[number + 1]) and (word.isalpha() or word.upper() == word.lower()):
        return False  # an exception, after a word or a number
    head = _HEAD.match(lines[number])
    if head is not None and number and shape(lines[number - 1]).startswith(shape(head[0])):
        return True  # vLLM puts its head in front of every line of a traceback
    if here.islower() and there.isupper() and not lines[number].rpartition(b" ")[2].count(b"."):
        return False  # a sentence that begins, after a word
    of_name = there.isalnum() or there in b"_.:/" or lines[number + 1][:2].strip(b"-").isalnum()
    return (here.isalnum() or here in b"_.:/-") and of_name
