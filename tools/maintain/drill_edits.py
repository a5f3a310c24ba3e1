"""Edit functions of vLLM and LMCache as a next release would, without changing their behaviour (`maintain.drill`)."""

import ast
import os
import random
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from kvfix import catalogue

Function = ast.FunctionDef

#: A fixed seed, so that each run makes the same edits.
SEED = 1


def make(folder: Path, vllm: Path, lmcache: Path, number: int) -> list[str]:
    """Copy both packages to `folder`/vllm and `folder`/lmcache, and edit `number` functions. Return the edits."""
    (site,) = vllm.glob("lib/python*/site-packages")
    places = {"vllm": folder / "vllm", "lmcache": folder / "lmcache"}
    for dist, source in (("vllm", site), ("lmcache", lmcache)):
        for part in (source / dist, *source.glob(f"{dist}-*.dist-info")):
            shutil.copytree(part, places[dist] / part.name, copy_function=os.link)
    chance = random.Random(SEED)
    fixed = {target.name: target for fix in catalogue.fixes() if fix.fixable for target in fix.targets}
    targets = [target for _, target in sorted(fixed.items())]
    chance.shuffle(targets)
    kinds = list(EDITS)
    made: list[str] = []
    for target in targets:
        path = places[target.dist].joinpath(*target.module.split(".")).with_suffix(".py")
        kind = kinds[len(made) % len(kinds)]
        if len(made) < number and path.is_file() and edit(path, target.function, EDITS[kind], places[target.dist]):
            made.append(f"{target.name}: {kind}")
    return made


def edit(path: Path, function: str, change: Callable[[Function, Path], bool], package: Path) -> bool:
    """Change one function of this file. Return False if this kind of edit does not fit it."""
    text = path.read_text()
    node: ast.AST | None = ast.parse(text)
    for name in function.split("."):
        body = getattr(node, "body", ())
        node = next((each for each in reversed(body) if getattr(each, "name", "") == name), None)
    if not isinstance(node, ast.FunctionDef) or not change(node, package):
        return False
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = text.splitlines(keepends=True)
    code = textwrap.indent(ast.unparse(node), " " * node.col_offset) + "\n"
    path.unlink()  # a hard link to the file of the release
    path.write_text("".join(lines[: first - 1]) + code + "".join(lines[node.end_lineno :]))
    return True


def rename_parameter(node: Function, package: Path) -> bool:
    """Rename the last positional parameter, if no caller passes it by name."""
    for argument in reversed(node.args.args[1:]):
        if _is_named_by_a_caller(node.name, argument.arg, package):
            continue
        old, new = argument.arg, f"{argument.arg}_given"
        argument.arg = new
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id == old:
                each.id = new
        return True
    return False


def _is_named_by_a_caller(function: str, parameter: str, package: Path) -> bool:
    call = re.compile(rf"\b{function}\((?:[^()]|\([^()]*\))*\b{parameter}\s*=[^=]")
    return any(call.search(path.read_text(errors="replace")) for path in package.rglob("*.py"))


def add_default(node: Function, package: Path) -> bool:
    """Add the default None to the last parameter without a default."""
    if len(node.args.args) - len(node.args.defaults) < 2:
        return False
    node.args.defaults.insert(0, ast.Constant(None))
    return True


def move_branch(node: Function, package: Path) -> bool:
    """Negate the first `if` and swap its branches."""
    for each in ast.walk(node):
        if isinstance(each, ast.If):
            each.test = ast.UnaryOp(ast.Not(), each.test)
            each.body, each.orelse = each.orelse or [ast.Pass()], each.body
            ast.fix_missing_locations(node)
            return True
    return False


EDITS: dict[str, Callable[[Function, Path], bool]] = {
    "a parameter renamed": rename_parameter,
    "a default added": add_default,
    "a branch moved": move_branch,
}
