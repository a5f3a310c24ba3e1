"""The pages of the documentation that are made from the code and from the lab's results, for mkdocs (mkdocs_hook).

A page for each fix, finding and rule, the support matrix, the index of messages, and the texts at the top of the
repository. None of them is kept in docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvfix_tools.doctor import checks
from maintain import scenario_matrix
from maintain.documentation import code_pages, contract_pages, error_index, released_table, support_matrix

#: Mark in the page of kvfix doctor that its checks replace.
CHECKS = "<!-- the checks -->"
#: {file at the top of the repository: the page that it becomes}
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip


#: Marks in the page of kvfix conform: its example, and its verdicts on vLLM's connectors, replace them.
CONNECTOR = "<!-- the connector -->"
CONNECTORS = "<!-- the table of connectors -->"
#: Mark in docs/released.md that the table of the fuzzer's findings replaces.
RELEASED = "<!-- what is found as released -->"


def pages(root: Path) -> dict[str, str]:
    """{path below docs/: markdown}, in the order in which a section lists them."""
    pairs = scenario_matrix.load((root / scenario_matrix.FILE).read_text())
    return {
        **{page: _relinked((root / name).read_text()) for name, page in TOP.items()},
        "matrix.md": support_matrix.page(pairs),
        "errors.md": error_index.page(),
        "contract.md": contract_pages.page(),
        **code_pages.pages(pairs),
    }


def filled(text: str) -> str:
    """Return the page, with generated text in place of each mark."""
    makers = {
        CHECKS: _checks,
        CONNECTOR: contract_pages.connector,
        CONNECTORS: contract_pages.connectors,
        RELEASED: released_table.text,
    }
    for mark, made in makers.items():
        if mark in text:
            text = text.replace(mark, made())
    return text


def _checks() -> str:
    rows = [f"| `{each.name}` | {each.doc} |" for each in checks.catalogue()]
    return "\n".join(["| check | what must be so |", "|---|---|", *rows])


def _relinked(text: str) -> str:
    """Change the links of a file at the top of the repository, so that they lead to the pages."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((\w+\.md)", lambda found: f"]({TOP.get(found[1], found[1])}", text)
