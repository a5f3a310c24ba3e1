"""Whole lives of engines one after the other, from the real logs: start, requests, end or crash."""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

from tests.diagnose.lines import real

FIXTURES = ("healthy-0.5.6", "crash-0.3.10", "mp-0.5.6", "degraded-0.5.6")
#: A request, or a time of LMCache's.
_OWN = re.compile(rb"(\b\d+-[0-9a-f]{8}\b(?!-)|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_LASTS = timedelta(minutes=2)


def lives(name: str, size: int, fresh: bool, first: int = 0) -> Iterator[bytes]:
    """Yield about `size` bytes. fresh: each life has new request ids and times. first: number of the first life."""
    life = real(name)
    parts = _OWN.split(life)
    for number in range(first, first + max(1, size // len(life))):
        if fresh:
            own = {part: _in_life(part, number) for part in set(parts[1::2])}
            parts_of_life = [own[part] if at % 2 else part for at, part in enumerate(parts)]
            yield b"".join(parts_of_life)
        else:
            yield life


def _in_life(part: bytes, number: int) -> bytes:
    if b":" in part:
        return str(datetime.fromisoformat(part.decode()) + number * _LASTS).encode()
    count, _, name = part.partition(b"-")
    return b"%d-%08x" % (int(count) + 100 * number, (int(name, 16) + number * 2654435761) % (1 << 32))
