"""Check that texts are plain English: `python -m maintain language`, which `make lint` runs.

The command prints `file:line: problem`, and exits with 1 if anything is wrong. The check reads PAGES and docstrings of
MODULES, but no tables, headings or code blocks. A code span, or an address without a link text, counts as one word.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
MAX_WORDS = 30
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md")
MODULES = ("patches/**/*.py", "tools/**/*.py", "tests/**/*.py")
#: A statement that starts with one of these words makes the reader wait for its subject.
_OPENER = re.compile(r"\W*(Of|What|That|Which|Whether)\b")
#: {phrase that is hard to read at night: plain replacement}
PHRASES = {
    "beside": "next to; with; in addition to",
    "anew": "again",
    "owed": "name who waits for what",
    "owes": "name who waits for what",
    "of others": "of other requests",
    "others'": "name whose",
    "such a": "name the thing again",
    "nothing of it": "name the thing again",
    "nothing of this": "name the thing again",
    "has it not": "does not have it",
    "have it not": "do not have it",
    "is it that": "use a statement",
    "is no text": "is not a string",
    "what is there": "name the thing",
    "come free": "become free",
    "comes free": "becomes free",
    "has it right": "does not have the bug",
    "have it right": "do not have the bug",
}
_PHRASE = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, PHRASES))})(?!\w)", re.IGNORECASE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|https?://\S+")
#: The name of a field in a docstring (`name: text`). `paragraphs` makes the text a list item.
_FIELD = re.compile(r"^[a-z_]+(?:, [a-z_]+)*: +", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*<]*(?:[A-Z0-9]|vLLM|kvfix))")


def main() -> int:
    found = sorted(
        f"{file.relative_to(ROOT)}:{line}: {wrong}"
        for file, first, text in texts(ROOT)
        for line, wrong in violations(text, first)
    )
    for each in found:
        print(each)
    return bool(found)


def texts(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, number of the first line, text) of each text to check."""
    for page in _files(root, PAGES):
        yield page, 1, page.read_text()
    for module in _files(root, MODULES):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    yield module, node.body[0].lineno, text


def _files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in root.glob(pattern))


def violations(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) of each violation. first: the number of the text's first line."""
    for line, paragraph in paragraphs(text):
        prose = _CODE.sub(lambda found: "\n" * found[0].count("\n") + "CODE", paragraph)
        prose = _LINK.sub(lambda found: found[1] or "LINK", prose)
        at = 0
        for sentence in _END.split(prose):
            begin = prose.index(sentence, at)
            number, at = first + line + prose.count("\n", 0, begin), begin + len(sentence)
            words = sentence.split()
            opener = _OPENER.match(sentence)
            if opener and not sentence.rstrip(" \"')*").endswith("?"):
                yield number, f'a sentence starts with "{opener[1]}": begin with the thing that acts'
            if len(words) > MAX_WORDS:
                yield number, f"a sentence of {len(words)} words (at most {MAX_WORDS}): {' '.join(words[:6])} ..."
            for phrase in _PHRASE.findall(sentence.replace("\n", " ")):
                yield number, f'"{phrase}": {PHRASES[phrase.lower()]}'


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) of each paragraph and list item of prose. The text's first line is 0."""
    for opening, token in pairwise(MarkdownIt().enable("table").parse(_FIELD.sub("- ", text))):
        if opening.type == "paragraph_open" and token.map:
            yield token.map[0], token.content
