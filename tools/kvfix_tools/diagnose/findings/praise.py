"""Texts that are content: they speak of the same things as a complaint."""

from __future__ import annotations

import re

#: A text that praises has the first and none of the second.
_GAIN = re.compile(
    r"(?i)\b(?:dropp?(?:s|ed)|falls?|fell|reduced?|reduces|cuts?|halve[sd]|improve[sd]?|faster|better|speed-?ups?)\b"
)
_COMPLAINT = re.compile(
    r"(?i)\b(?:no|not|never|none|nothing|only|but|however|why|slow\w*|worse|higher|without|same|hardly|expect\w*|should"
    r"|bug|increase[sd]?|regress\w*)\b|n't|\?|[\u6ca1\u4e0d\u672a\u65e0]"
)
_FROM_TO = re.compile(r"(?i)\bfrom (\d+(?:\.\d+)?) ?(ms|s|sec\w*)? to (\d+(?:\.\d+)?) ?(ms|s|sec\w*)?\b")


def praises(text: str) -> bool:
    """Whether a text speaks of a gain and complains of nothing."""
    if _COMPLAINT.search(text):
        return False
    pairs = _FROM_TO.findall(text)
    falls = any(_seconds(new, own, other) < _seconds(old, other, own) for old, other, new, own in pairs)
    return falls or bool(_GAIN.search(text))


def _seconds(number: str, unit: str, other: str) -> float:
    return float(number) / (1000 if (unit or other) == "ms" else 1)
