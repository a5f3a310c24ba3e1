"""Lines that tell of nothing wrong are most of a log. They are kept as they stand, and the ledger hears of them only if
more becomes of their request: another question, a line that is not of these, a story that is to be told.

What is kept is such that no rule of the ledger can have a word to say to it: a test holds the two together.
"""

from __future__ import annotations

from itertools import islice

from kvfix_tools.diagnose import scan

#: {kind of line that may be kept: where its request stands among its groups}
NAMES = {"asked": 0, "retrieved": 0, "due": 2, "storing": 3}
#: Requests whose lines are kept; the oldest are forgotten: millions take no more memory.
REQUESTS = 10_000
#: Lines kept of one request.
LINES = 24

#: What becomes of a line: it is kept; it asks the same again, and is answered the same; it is to be told now.
KEPT, AGAIN, NEWS = range(3)

#: file, number of the line, its time as it stands there
Place = tuple[str, int, bytes]
Line = tuple[str, scan.Groups, Place]


class Usual:
    def __init__(self) -> None:
        #: {request: what it asked last, and lines that the ledger has not heard of, the first of them that question}
        self._requests: dict[bytes, tuple[list[scan.Groups], list[Line]]] = {}

    def take(self, name: str, groups: scan.Groups, place: Place) -> int:
        request = groups[NAMES[name]]
        if request is None:
            return NEWS
        known = self._requests.get(request)
        if name == "asked":
            if known is None:
                if len(self._requests) >= REQUESTS:
                    for oldest in list(islice(self._requests, REQUESTS // 4)):
                        del self._requests[oldest]
                right = _is_right(groups)
                self._requests[request] = ([groups], [(name, groups, place)] if right else [])
                return KEPT if right else NEWS
            if known[0][0] == groups:
                return AGAIN
            known[0][0] = groups
            return NEWS
        if known is None or not 0 < len(known[1]) < LINES or not _follows(name, groups, known[0][0]):
            return NEWS
        known[1].append((name, groups, place))
        return KEPT

    def untold(self, request: str) -> list[Line]:
        """What the ledger has not heard of this request, in order. Now it has."""
        known = self._requests.get(request.encode())
        if known is None or not known[1]:
            return []
        lines = known[1][:]
        known[1].clear()
        return lines


def _is_right(groups: scan.Groups) -> bool:
    """The first question about a request: nothing is promised, or less than what is left to compute.

    Before 0.3.14 the line leaves out what vLLM had.
    """
    request, total, computed, hit, need, least = groups
    if request is None or total is None or hit is None or need is None or least is not None:
        return False
    if not request.isascii():  # its name is not spelt as in the ledger
        return False
    promised = int(need)
    if promised <= 0:
        return True
    return int(hit) <= int(total) if computed is None else promised < int(total) - int(computed)


def _follows(name: str, groups: scan.Groups, asked: scan.Groups) -> bool:
    """All that was due is loaded; what is due is what was hit and not computed; what is stored leaves no hole."""
    if name == "retrieved":
        return groups[1] == groups[2]
    hit, need = asked[3] or b"0", asked[4] or b"0"
    if name == "due":
        return groups[0] == hit and groups[1] == asked[2] and need[0] not in b"-0" and _balanced(asked)
    return int(groups[2] or 0) <= int(hit)


def _balanced(asked: scan.Groups) -> bool:
    """What was promised is the hit less what vLLM had; of a hit of all tokens the last is computed again."""
    _, total, computed, hit, need, _ = asked
    return int(need or 0) == int(hit or 0) - int(computed or 0) - (hit == total)
