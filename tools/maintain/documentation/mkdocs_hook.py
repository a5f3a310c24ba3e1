"""The hooks of mkdocs (`hooks:` in mkdocs.yml): add the generated pages, and remove what no page needs."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from maintain import documentation

#: Files of the theme that no page needs: source maps, and the search that theme/search.js replaces.
_UNUSED = re.compile(r"\.map$|^assets/javascripts/(lunr|workers)/")
#: These pages repeat the titles and messages of other pages, so search leaves them out. Their tables are wide.
_LISTS = {"errors.md", "fixes/index.md", "findings/index.md", "rules/index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if _UNUSED.search(file.src_uri)]:
        files.remove(file)
    for path, text in documentation.pages(Path(config.config_file_path).parent).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the parts of a page that are generated from the code."""
    if page.file.src_uri in _LISTS:
        page.meta.update(search={"exclude": True}, hide=["toc"])
    return documentation.filled(markdown)


@event_priority(-100)  # after the search plugin, which reads the table of contents
def on_page_context(context: Any, page: Page, **_: Any) -> None:
    """Leave the table of contents out of the pages of findings, which are short."""
    if page.file.src_uri.startswith("findings/"):
        page.toc.items.clear()


def on_post_page(output: str, **_: Any) -> str:
    """Remove the theme's indentation, which is half of a page."""
    return re.sub(r"(?s)(<pre\b.*?</pre>)|\s*\n\s*", lambda found: found[1] or "\n", output)


@event_priority(-100)
def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script, which a browser also loads from file://. The theme asks for the JSON file."""
    index = Path(config.site_dir) / "search/search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
    index.write_text('{"config": {}, "docs": []}')
