"""The pages of the documentation that are made from the code and from what the lab ran; `hook` gives them to mkdocs.

A page for each fix, finding and rule, the support matrix, the index of messages, and the texts that stand at the top of
the repository. None of them is kept in docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvfix_tools.docs import errors, findings, fixes, matrix, rules

#: At the top of the repository, and the page that each becomes.
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip


def pages(root: Path) -> dict[str, str]:
    """{path below docs/: markdown}, in the order in which a section lists them."""
    pairs = matrix.load((root / "docs/matrix.json").read_text())
    return {
        **{page: _of_top((root / name).read_text()) for name, page in TOP.items()},
        "matrix.md": matrix.page(pairs),
        "errors.md": errors.page(),
        **fixes.pages(pairs),
        **findings.pages(),
        **rules.pages(),
    }


def _of_top(text: str) -> str:
    """Links from the top of the repository lead to the pages."""
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((\w+\.md)", lambda found: f"]({TOP.get(found[1], found[1])}", text)
