"""The command `kvfix doctor`: read the set-up, run the checks, print their lines."""

import json as jsonlib
import os
import sys
from collections import Counter

from kvfix_tools import screen
from kvfix_tools.doctor import checks, command_line
from kvfix_tools.doctor.checks import OK, PROBLEM, UNCHECKED, Line
from kvfix_tools.doctor.setup import Setup

_WORDS = {PROBLEM: "PROBLEM", UNCHECKED: "not checked", OK: "ok"}  # in the order of the report


def doctor(words: list[str], json: bool, server_http: str = "", names: bool = False) -> int:
    """Return 1 for a problem, 2 if the words start neither vLLM nor LMCache, 77 if no essential check ran, else 0."""
    if names:
        for each in checks.catalogue():
            print(f"{each.name}: {each.doc}")
        return 0
    command = None
    if words:
        try:
            command = command_line.read(words)
        except ValueError as error:
            return screen.error(f"kvfix doctor: the command cannot be parsed: {error}")
        if command is None:
            return screen.error("kvfix doctor: the command starts neither vLLM nor an LMCache server")
    print("reading the installation and loading the compiled extensions ...", file=sys.stderr)
    lines = list(checks.lines(Setup(command, os.environ, server_http=server_http)))
    if json:
        print(jsonlib.dumps([line._asdict() for line in lines], indent=2))
    else:
        print(text(lines), end="")
    return exit_code(lines)


def exit_code(lines: list[Line]) -> int:
    if any(line.status == PROBLEM for line in lines):
        return 1
    essential = {each.name for each in checks.catalogue() if each.essential}
    return 0 if any(line.status == OK and line.check in essential for line in lines) else 77


def text(lines: list[Line]) -> str:
    shown = []
    for line in sorted(lines, key=lambda line: list(_WORDS).index(line.status)):
        shown.append(f"{_WORDS[line.status]:<11}  {line.check}: {line.what}")
        if line.do:
            shown.append(f"{'':<11}      do: {line.do}")
    count = Counter(line.status for line in lines)
    problems = f"{count[PROBLEM]} {'problem' if count[PROBLEM] == 1 else 'problems'}"
    summary = f"SUMMARY: kvfix doctor: {problems}, {count[OK]} ok, {count[UNCHECKED]} not checked\n"
    return "\n".join([*shown, summary])
