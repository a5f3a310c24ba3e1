"""Return markdown for generated pages: links, tables, sections, ranges of releases."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

FOLDERS = {"KVF": "fixes", "KVD": "findings", "KVR": "rules", "LAB": "rules"}
NAMES = {"lmcache": "LMCache", "vllm": "vLLM"}


def link(code: str, up: str = "../") -> str:
    """Return a link to the page of a fix, finding or rule. up: path to docs/ from the page that has the link."""
    return f"[{code}]({up}{FOLDERS[code[:3]]}/{code.lower()}.md)"


def links(codes: Iterable[str], up: str = "../") -> str:
    return ", ".join(link(code, up=up) for code in codes)


def code(text: str) -> str:
    """Return a text as markdown code that is valid in a cell of a table."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def filtered(head: Sequence[str], rows: Iterable[Sequence[str]], up: str = "") -> str:
    """Return a table with input fields that filter the rows (theme/filter.js). up: path from the page to docs/."""
    return f'{table(head, rows)}\n<script src="{up}filter.js"></script>\n'


def facts(rows: dict[str, str]) -> str:
    return "".join(f"- {name}: {value}\n" for name, value in rows.items() if value)


def sections(parts: dict[str, str]) -> str:
    """Return a heading and the text for each part whose text is not empty."""
    return "".join(f"## {name}\n\n{text}\n" for name, text in parts.items() if text)


def prose(text: str) -> str:
    """Return a docstring as markdown. Add the blank line that markdown needs between a sentence and its list."""
    return re.sub(r"(?m)^([^-\s].*)\n(?=- )", r"\1\n\n", text.strip())


def span(releases: Sequence[str], among: Sequence[str]) -> str:
    """Return the releases as runs of the sorted list `among`, such as `0.3.9 to 0.3.11, 0.4.1`."""
    runs = [list(run) for inside, run in groupby(among, key=lambda release: release in releases) if inside]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
