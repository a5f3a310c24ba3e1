"""The parts of the documentation that are made from the code and from the lab's results, for mkdocs (mkdocs_hook).

A page for each fix, finding and rule and for the texts at the top of the repository, and tables in place of marks.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kvfix_tools.doctor import checks
from maintain import scenario_matrix
from maintain.documentation import code_pages, connector_pages, error_index, support_matrix
from maintain.documentation.markdown import table

#: {file at the top of the repository: the page that it becomes}
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip


ROOT = Path(__file__).parents[3]


@lru_cache(maxsize=1)
def pairs() -> scenario_matrix.Pairs:
    return scenario_matrix.load((ROOT / scenario_matrix.FILE).read_text())


def pages(root: Path) -> dict[str, str]:
    """{path below docs/: markdown}, in the order in which a section lists them."""
    return {**{page: _relinked((root / name).read_text()) for name, page in TOP.items()}, **code_pages.pages(pairs())}


def filled(text: str) -> str:
    for mark, made in MARKS.items():
        if mark in text:
            text = text.replace(mark, made())
    return text


def _checks() -> str:
    rows = [(f"`{each.name}`", each.doc) for each in checks.catalogue()]
    return table(("check", "what must be so"), rows).rstrip("\n")


#: {mark in a page: function with the text that replaces the mark}
MARKS: dict[str, Callable[[], str]] = {
    "<!-- the checks -->": _checks,
    "<!-- the connector -->": connector_pages.connector,
    "<!-- the table of connectors -->": connector_pages.connectors,
    "<!-- the table of released findings -->": connector_pages.released,
    "<!-- the rules for connectors -->": connector_pages.contract,
    "<!-- the table of fixes -->": code_pages.fixes,
    "<!-- the table of findings -->": code_pages.findings,
    "<!-- the table of rules -->": code_pages.rules,
    "<!-- the table of messages -->": error_index.messages,
    "<!-- the pairs -->": lambda: support_matrix.as_json(pairs()),
    "<!-- when the pairs were played -->": lambda: support_matrix.when_played(pairs()),
}


def _relinked(text: str) -> str:
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((\w+\.md)", lambda found: f"]({TOP.get(found[1], found[1])}", text)
