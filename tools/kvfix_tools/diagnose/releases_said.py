"""Releases that a short text names in prose, a list of packages, or an image: `lmcache version : 0.3.9.post2`."""

from __future__ import annotations

import re

_RELEASE = r"(?P<release>\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)(?!\.?\d)"
#: A name, marks of Markdown or a table, a release.
_NAMED = re.compile(
    rf"(?i)(?<![\w./])(?P<dist>vllm|lmcache)(?=[^\w-]|v?\d|-\d|$)[`*'\"\])|-]*(?:[ \t]+(?:version|release))?"
    rf"[\s:=|`*'\"(]*(?:is |at |from )?v?{_RELEASE}"
)
#: What pip shows of a package.
_SHOWN = re.compile(rf"(?i)^Name: (?P<dist>vllm|lmcache)\s+Version: {_RELEASE}", re.MULTILINE)
#: Images whose tag is the release of LMCache.
_IMAGE = re.compile(rf"(?P<dist>lmcache)/(?:vllm-openai|standalone|lmcache-operator):v?{_RELEASE}")
#: Words before it, by which another release is meant than the one that runs.
_OTHER = re.compile(
    r"(?i)(?:upgrad|updat|downgrad|fix|requir|works? |worked|normal|fine|since|until|before|after|instead|old|new|than"
    r"|support|prior|[<>])[^.,;\n]{0,24}$"
)


def said(text: str) -> dict[str, str]:
    """{"lmcache" or "vllm": its release}, where the text names one release of it and no other."""
    found: dict[str, set[str]] = {}
    for each in (*_NAMED.finditer(text), *_SHOWN.finditer(text), *_IMAGE.finditer(text)):
        if not _OTHER.search(text[max(0, each.start() - 40) : each.start()]):
            found.setdefault(each["dist"].lower(), set()).add(each["release"])
    return {dist: release for dist, (release, *others) in found.items() if not others}
