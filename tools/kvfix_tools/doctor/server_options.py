"""The options of `lmcache server`, read from the installed release's `add_argument` calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from kvfix_tools.doctor.packages import Package, constant, parse

_PLACES = ("v1/multiprocess", "v1/distributed", "v1/mp_observability", "cli/commands")


class Option(NamedTuple):
    """An option. default: None if there is none or it is unknown. choices: () if any value is allowed."""

    default: Any
    choices: tuple[str, ...]
    required: bool


@lru_cache(maxsize=4)
def read(lmcache: Package) -> dict[str, Option]:
    """Return {"--chunk-size": Option, ...}; {} if this release has no `lmcache server`."""
    if lmcache.file("lmcache.cli.commands.server") is None:
        return {}
    found: dict[str, Option] = {}
    for place in _PLACES:
        for file in sorted((lmcache.folder / place).rglob("*.py")):
            if place == "cli/commands" and file.name not in ("server.py", "base.py"):
                continue
            if b"add_argument(" not in file.read_bytes():  # this search is faster than parsing
                continue
            tree = parse(file)
            for name, option in _arguments(tree) if tree else ():
                found.setdefault(name, option)
    return found


def _arguments(tree: ast.Module) -> Iterator[tuple[str, Option]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
            continue
        given = {each.arg: each.value for each in node.keywords}
        choices = constant(given.get("choices"))
        option = Option(
            constant(given.get("default")),
            tuple(str(each) for each in choices) if isinstance(choices, list | tuple) else (),
            constant(given.get("required")) is True,
        )
        for argument in node.args:
            name = constant(argument)
            if isinstance(name, str) and name.startswith("--"):
                yield name, option
                if "BooleanOptionalAction" in ast.unparse(given["action"]) if "action" in given else False:
                    yield f"--no-{name.removeprefix('--')}", option
