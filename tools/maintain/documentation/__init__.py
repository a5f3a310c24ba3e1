"""The pages of the documentation that are made from the code and from the lab's results, for mkdocs (mkdocs_hook).

A page for each fix, finding and rule, the support matrix, the index of messages, and the texts at the top of the
repository. None of them is kept in docs/.
"""

import re
from pathlib import Path

from kvfix_tools.doctor import checks
from maintain import scenario_matrix
from maintain.documentation import code_pages, connector_pages, error_index, support_matrix
from maintain.documentation.markdown import table

#: {file at the top of the repository: the page that it becomes}
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip


def pages(root: Path) -> dict[str, str]:
    """{path below docs/: markdown}, in the order in which a section lists them."""
    pairs = scenario_matrix.load((root / scenario_matrix.FILE).read_text())
    return {
        **{page: _relinked((root / name).read_text()) for name, page in TOP.items()},
        "matrix.md": support_matrix.page(pairs),
        "errors.md": error_index.page(),
        "contract.md": connector_pages.contract(),
        **code_pages.pages(pairs),
    }


def filled(text: str) -> str:
    """Return the page, with generated text in place of each mark."""
    for mark, made in MARKS.items():
        if mark in text:
            text = text.replace(mark, made())
    return text


def _checks() -> str:
    rows = [(f"`{each.name}`", each.doc) for each in checks.catalogue()]
    return table(("check", "what must be so"), rows).rstrip("\n")


#: {mark in a page: function with the text that replaces the mark}
MARKS = {
    "<!-- the checks -->": _checks,
    "<!-- the connector -->": connector_pages.connector,
    "<!-- the table of connectors -->": connector_pages.connectors,
    "<!-- the table of findings -->": connector_pages.released,
}


def _relinked(text: str) -> str:
    """Change the links of a file at the top of the repository, so that they lead to the pages."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((\w+\.md)", lambda found: f"]({TOP.get(found[1], found[1])}", text)
