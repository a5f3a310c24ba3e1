"""`kvfix search`: find the fixes, known problems and rules that share words with a description."""

import json as jsonlib
import re
import sqlite3
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvfix import catalogue as fixes
from kvfix_tools import screen
from kvfix_tools.diagnose import statements
from kvfix_tools.diagnose.problems import catalogue as known_problems
from kvfix_tools.ledger import RULES

#: _SHOWN: number of candidates to show. _WORDS, _CHARACTERS: maximum words and characters of a text that kvfix uses.
_SHOWN, _WORDS, _CHARACTERS = 3, 200, 64_000
#: Weights of a word in an entry's title, symptom and other text, in this order.
_WEIGHTS = "3.0, 6.0, 1.0"
_WORD = re.compile(r"[A-Za-z]{2,}|\d{2,}")


class Candidate(NamedTuple):
    code: str
    name: str
    title: str
    confirm: str


def search(text: str, json: bool) -> int:
    """Print the entries that match best. text: the description, the name of a file, or `-` for standard input."""
    try:
        found = candidates(_read(text))
    except OSError as error:
        return screen.error(f"kvfix search: cannot read {text}: {error.strerror}")
    if json:
        print(jsonlib.dumps({"candidates": [each._asdict() for each in found]}, indent=2))
    elif not found:
        print("No fix, known problem or rule has these words. If you have a log, run: kvfix-diagnose LOG")
    else:
        print("These entries have the most words in common with your text. Confirm an entry before you act on it.")
        for each in found:
            print(f"\n{each.code} {each.name}\n  {each.title}\n  To confirm: {each.confirm}")
            print(f"  Read more: kvfix explain {each.code}")
    return 0


def _read(text: str) -> str:
    if text == "-":
        return sys.stdin.read(_CHARACTERS)
    if "\n" not in text and len(text) < 4096 and Path(text).is_file():
        with Path(text).open(encoding="utf-8", errors="replace") as file:
            return file.read(_CHARACTERS)
    return text[:_CHARACTERS]


def candidates(text: str) -> list[Candidate]:
    """Return the entries with the most words in common with the text, the best first."""
    words = [word.lower() for word in _WORD.findall(text)][:_WORDS]
    pairs = [f"{first} {second}" for first, second in pairwise(words)]
    entries = list(_entries())
    with sqlite3.connect(":memory:") as index:
        index.execute("CREATE VIRTUAL TABLE entry USING fts5(title, shows, rest, tokenize = 'porter unicode61')")
        rows = ((candidate.title, shows, rest) for candidate, shows, rest in entries)
        index.executemany("INSERT INTO entry VALUES (?, ?, ?)", rows)
        query = " OR ".join(f'"{each}"' for each in dict.fromkeys((*words, *pairs)))
        best = f"SELECT rowid FROM entry WHERE entry MATCH ? ORDER BY bm25(entry, {_WEIGHTS}) LIMIT {_SHOWN}"
        found = index.execute(best, (query,)).fetchall() if words else []
    return [entries[row - 1][0] for (row,) in found]


def _entries() -> Iterator[tuple[Candidate, str, str]]:
    """Yield (candidate, text of the symptom, text of the entry)."""
    for fix in fixes.fixes():
        confirm = "kvfix status --probe shows whether this installation has the bug"
        if fix.scenarios:
            plays = f"kvfix lab run {fix.scenarios[0]} reproduces the bug"
            confirm = f"kvfix status shows whether this installation has the bug; {plays}"
        candidate = Candidate(fix.code, fix.slug, fix.title, confirm)
        yield candidate, fix.section("Symptom"), " ".join((fix.slug, fix.doc or ""))
    rows = [row for each in statements.known().values() for row in each]
    for problem in known_problems():
        has = f", or your log has `{problem.signs[0]}`" if problem.signs else ""
        confirm = f"kvfix-diagnose LOG reports {problem.code}{has}"
        candidate = Candidate(problem.code, problem.name, problem.title, confirm)
        logged = [row.template for row in rows if row.message in problem.on]
        texts = (problem.name, problem.why, problem.first, problem.do, problem.for_good, problem.normal)
        yield candidate, " ".join([*problem.signs, *logged]), " ".join([*texts, *problem.connectors])
    for rule in RULES:
        title = rule.doc.strip().partition("\n")[0]
        candidate = Candidate(rule.code, rule.name, title, f"kvfix run --mode check -- CMD reports {rule.code}")
        yield candidate, "", " ".join((rule.name, rule.doc))
