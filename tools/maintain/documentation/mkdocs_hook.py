"""The hooks of mkdocs (`hooks:` in mkdocs.yml): add the generated pages, and remove files that no page needs.

Each fix, finding, rule and file of TOP gets a page. Generated texts replace the MARKS in written pages.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvfix_tools.doctor import checks
from maintain import scenario_matrix
from maintain.documentation import code_pages, connector_pages, error_index, support_matrix
from maintain.documentation.markdown import table

#: Files of the theme that no page needs: source maps, and the theme's search, which theme/search.js replaces.
_UNUSED = re.compile(r"\.map$|^assets/javascripts/(lunr|workers)/")
#: Pages with wide tables. The search leaves these pages out, because they repeat texts of other pages.
_LISTS = {"errors.md", "fixes/index.md", "findings/index.md", "rules/index.md"}
#: {file at the top of the repository: page with the file's text}
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
       "SECURITY.md": "security.md"}  # fmt: skip
ROOT = Path(__file__).parents[3]


@lru_cache(maxsize=1)
def pairs() -> scenario_matrix.Pairs:
    return scenario_matrix.load((ROOT / scenario_matrix.FILE).read_text())


def _checks() -> str:
    return table(("check", "what must be so"), [(f"`{each.name}`", each.doc) for each in checks.catalogue()]).rstrip()


#: {mark in a page: function that returns the text for this place}
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if _UNUSED.search(file.src_uri)]:
        files.remove(file)
    made = {}  # {path below docs/: markdown}, in the order in which a section lists the pages
    for name, page in TOP.items():
        text = Path(config.config_file_path).with_name(name).read_text().replace("](docs/", "](")
        made[page] = re.sub(r"\]\((\w+\.md)", lambda found: f"]({TOP.get(found[1], found[1])}", text)
    for path, text in {**made, **code_pages.pages(pairs())}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace the marks in a page by generated text. On pages in _LISTS, hide the table of contents to make room."""
    if page.file.src_uri in _LISTS:
        page.meta.update(search={"exclude": True}, hide=["toc"])
    for mark, made in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


@event_priority(-100)  # run after the search plugin, which reads the table of contents
def on_page_context(context: Any, page: Page, **_: Any) -> None:
    """Leave out the table of contents on the pages of findings, because these pages are short."""
    if page.file.src_uri.startswith("findings/"):
        page.toc.items.clear()


def on_post_page(output: str, **_: Any) -> str:
    """Remove the theme's indentation, which is half of the bytes of a page."""
    return re.sub(r"(?s)(<pre\b.*?</pre>)|\s*\n\s*", lambda found: found[1] or "\n", output)


@event_priority(-100)
def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script, because browsers do not load JSON from file://. Empty the theme's JSON."""
    index = Path(config.site_dir) / "search/search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
    index.write_text('{"config": {}, "docs": []}')
