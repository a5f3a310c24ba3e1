"""The hooks of mkdocs (`hooks:` in mkdocs.yml): add the generated pages, and their places in the navigation."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from maintain import documentation


@lru_cache(maxsize=1)
def _pages(config_file: str) -> dict[str, str]:
    return documentation.pages(Path(config_file).parent)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """An entry `Fixes: fixes/` of the navigation is the index of that folder.

    The side bar does not list a folder's other pages: each page would repeat the list of a thousand.
    """
    config.nav = [
        {title: f"{place}index.md" if place.endswith("/") else place}
        for entry in config.nav or []
        for title, place in entry.items()
    ]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the parts of a page that are made from the code."""
    return documentation.filled(markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in _pages(config.config_file_path).items():
        files.append(File.generated(config, path, content=text))
    return files
