"""`make drill`: test kvfix with releases of vLLM and LMCache that kvfix does not know.

The drill removes the newest vLLM and LMCache from the fingerprints. For each connector, the drill runs every scenario
and `--steps` fuzzed steps, without and with the fixes. Then the drill edits functions that kvfix fixes, and repeats
all runs. The edits keep the functions' behaviour. Exit 1 if an outcome is worse with the fixes than without the fixes.
"""

import ast
import json
import math
import os
import random
import re
import shutil
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import kvfix
from kvfix import applicability, catalogue
from kvfix_tools.command_options import Names
from kvfix_tools.lab import runner
from maintain import fingerprints
from maintain.scenario_matrix import VLLM, answer_of

LMCACHE = Path(".cache/lmcache")
OLDER_LMCACHE = {"mp-in-tree": "0.4.6"}  # {connector: LMCache release, if not the newest}
CONNECTORS = (
    "v1", "mp", "mp-in-tree", "offloading", "simple-offload", "nixl-pull", "nixl-push", "nixl-offload", "mooncake",
)  # fmt: skip
#: The lab's rule for an error in the code of a fix. A violation of this rule always counts as worse.
FAULT = "LAB007"
#: Rules grouped by the effect of a violation, the worst effect first (fixes/record.py). A rule that is not in EFFECTS
#: counts as wrong output in a run with the fixes, and as lost hits in a run without the fixes.
EFFECTS = (
    ("KVR008", "KVR014", "KVR017", "KVR018", "KVR020", "KVR021", "KVR022", "KVR026", "KVR027", "LAB001", "LAB008"),
    ("KVR011",),  # a crash
    ("KVR010", "KVR012", "LAB003", "LAB009", "LAB021", "LAB026"),  # a hang
    ("KVR009", "KVR015", "KVR025", "LAB017", "LAB020", "LAB022", "LAB028", "LAB029"),  # a leak
)


def newest(dist: str) -> str:
    return str(applicability.fingerprints()[dist]["releases"][-1])


def effect(rule: str, unknown: int) -> int:
    """Return the position of the rule's effect in EFFECTS; 0 is the worst. unknown: result for rules not in EFFECTS."""
    return next((at for at, rules in enumerate(EFFECTS) if rule in rules), unknown)


def worse(released: set[str], fixed: set[str]) -> list[str]:
    """Return the rules of `fixed` that are worse than all rules of `released`, and FAULT if only `fixed` has FAULT."""
    worst = min((effect(rule, len(EFFECTS)) for rule in released), default=len(EFFECTS) + 1)
    return sorted(rule for rule in fixed - released if rule == FAULT or effect(rule, 0) < worst)


def answer(connector: str, lmcache: str, steps: int, forgotten: dict[str, str]) -> None:
    known = applicability.fingerprints()
    changed = {**known, **{dist: fingerprints.without(known[dist], [version]) for dist, version in forgotten.items()}}
    vars(applicability)["fingerprints"] = lambda: changed
    runner.prepare(lmcache)
    print(json.dumps({"connector": connector, **scenarios(connector), **fuzzed(connector, steps), **states()}))


def scenarios(connector: str) -> dict[str, Any]:
    from kvfix_tools.lab.scenario import scenarios

    found, played = [], 0
    for scenario in scenarios():
        if scenario.options.connector != connector or runner.expected(scenario) == "not-applicable":
            continue
        played += 1
        released, fixed = (runner.play(scenario, fixes) for fixes in (False, True))
        codes = [{each.code for each in result.findings} for result in (released, fixed)]
        found += [f"{scenario.slug}: {code}" for code in worse(*codes)]
    return {"scenarios": played, "worse_scenarios": found}


def fuzzed(connector: str, steps: int) -> dict[str, Any]:
    """Run the random schedule of each seed without and with the fixes. Return the seeds with worse violations.

    A run ends when the engine dies, so the run with the fixes can be longer, and can violate more rules. So a worse
    rule counts only if no run without the fixes violates the rule. A rule about wrong output also counts if the same
    seed violates no rule without the fixes.
    """
    from kvfix_tools.lab.fuzz import fuzz_run

    both = [fuzz_run.Run(connector, fixes) for fixes in (False, True)]
    done, seeds = 0, list[tuple[set[str], set[str]]]()
    while done < steps:
        released, fixed = set[str](), set[str]()
        for run, rules in zip(both, (released, fixed), strict=True):
            tally = run.play(range(len(seeds), len(seeds) + 1), math.inf)
            rules.update(rule for _, _, rule, _ in tally.found.values())
        done += tally.steps
        seeds.append((released, fixed))
    as_released = set[str]().union(*(released for released, _ in seeds))
    return {
        "steps": done,
        "seeds": len(seeds),
        "worse_seeds": [
            f"seed {seed}: {rule}"
            for seed, (released, fixed) in enumerate(seeds)
            for rule in worse(released, fixed)
            if rule not in as_released or (not released and effect(rule, 0) == 0)
        ],
    }


def states() -> dict[str, Any]:
    """Return the states of the fixes in this process. The process must have imported the connector's modules."""
    with runner.applied(True):
        rows = [row for row in kvfix.status() if (fix := catalogue.find(row.code)) is not None and fix.fixable]
    return {
        "fixes": dict(Counter(row.verdict for row in rows)),
        "refused": {row.code: row.reason for row in rows if row.verdict == "refused"},
    }


def in_its_process(connector: str, steps: int, edited: Path | None) -> dict[str, Any]:
    """Run the connector in another process. edited: a folder with edited copies of `vllm` and `lmcache`."""
    older = OLDER_LMCACHE.get(connector)
    lmcache = edited / "lmcache" if edited is not None and not older else LMCACHE / (older or newest("lmcache"))
    forgotten = {dist: newest(dist) for dist in ("vllm", "lmcache")}
    code = f"from maintain import drill; drill.answer({connector!r}, {str(lmcache)!r}, {steps}, {forgotten!r})"
    first = [edited / "vllm"] if edited is not None else []
    return dict(answer_of(VLLM / newest("vllm") / "bin/python", code, *first))


def edit_packages(folder: Path, vllm: Path, lmcache: Path, number: int) -> list[str]:
    """Copy both packages to `folder`/vllm and `folder`/lmcache, and edit `number` functions. Return the edits."""
    (site,) = vllm.glob("lib/python*/site-packages")
    places = {"vllm": folder / "vllm", "lmcache": folder / "lmcache"}
    for dist, source in (("vllm", site), ("lmcache", lmcache)):
        for part in (source / dist, *source.glob(f"{dist}-*.dist-info")):
            shutil.copytree(part, places[dist] / part.name, copy_function=os.link)
    chance = random.Random(1)  # the fixed seed gives the same edits in every run
    fixed = {target.name: target for fix in catalogue.fixes() if fix.fixable for target in fix.targets}
    targets = [target for _, target in sorted(fixed.items())]
    chance.shuffle(targets)
    made: list[str] = []
    for target in targets:
        path = places[target.dist].joinpath(*target.module.split(".")).with_suffix(".py")
        change = EDITS[len(made) % len(EDITS)]
        if len(made) < number and path.is_file() and edit(path, target.function, change, places[target.dist]):
            made.append(f"{target.name}: {change.__name__}")
    return made


def edit(path: Path, function: str, change: Callable[[ast.FunctionDef, Path], bool], package: Path) -> bool:
    """Change one function of this file. Return False if `change` cannot edit this function."""
    text = path.read_text()
    node: ast.AST | None = ast.parse(text)
    for name in function.split("."):
        node = next((each for each in reversed(getattr(node, "body", ())) if getattr(each, "name", "") == name), None)
    if not isinstance(node, ast.FunctionDef) or not change(node, package):
        return False
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = text.splitlines(keepends=True)
    code = textwrap.indent(ast.unparse(node), " " * node.col_offset) + "\n"
    path.unlink()  # the path is a hard link, so writing to it would change the file of the release
    path.write_text("".join(lines[: first - 1]) + code + "".join(lines[node.end_lineno :]))
    return True


def rename_parameter(node: ast.FunctionDef, package: Path) -> bool:
    """Rename the last positional parameter that no call passes by name. Return False if no parameter can be renamed."""
    for argument in reversed(node.args.args[1:]):
        call = re.compile(rf"\b{node.name}\((?:[^()]|\([^()]*\))*\b{argument.arg}\s*=[^=]")
        if any(call.search(path.read_text(errors="replace")) for path in package.rglob("*.py")):
            continue
        old, argument.arg = argument.arg, f"{argument.arg}_given"
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id == old:
                each.id = argument.arg
        return True
    return False


def add_default(node: ast.FunctionDef, package: Path) -> bool:
    if len(node.args.args) - len(node.args.defaults) < 2:
        return False
    node.args.defaults.insert(0, ast.Constant(None))
    return True


def move_branch(node: ast.FunctionDef, package: Path) -> bool:
    for each in ast.walk(node):
        if isinstance(each, ast.If):
            each.test = ast.UnaryOp(ast.Not(), each.test)
            each.body, each.orelse = each.orelse or [ast.Pass()], each.body
            ast.fix_missing_locations(node)
            return True
    return False


EDITS = (rename_parameter, add_default, move_branch)
HEAD = f"{'connector':<16}{'scenarios':>10}{'steps':>9}{'applied':>9}{'refused':>9}{'undecided':>11}  worse"


def main(connector: Annotated[Names, typer.Option()] = None, steps: int = 100_000, edits: int = 30) -> int:
    if not set(connector or ()) <= set(CONNECTORS):
        raise typer.BadParameter(f"--connector is one of {', '.join(CONNECTORS)}")
    is_worse = False
    with tempfile.TemporaryDirectory(prefix="kvfix-drill-", dir=".cache") as folder:
        for number in sorted({0, edits}):
            edited, made = None, list[str]()
            if number:
                edited = Path(folder).resolve()
                made = edit_packages(edited, VLLM / newest("vllm"), LMCACHE / newest("lmcache"), number)
            title = f"vLLM {newest('vllm')} and LMCache {newest('lmcache')} as unknown releases, {len(made)} edits"
            print(f"\n{title}\n{HEAD}", flush=True)
            refused: dict[str, str] = {}
            for each in connector or CONNECTORS:
                row = in_its_process(each, steps, edited)
                fixes, found = row["fixes"], row["worse_scenarios"] + row["worse_seeds"]
                counts = f"{fixes.get('applied', 0):>9}{fixes.get('refused', 0):>9}{fixes.get('unknown', 0):>11}"
                line = f"{each:<16}{row['scenarios']:>10}{row['steps']:>9}{counts}  {'; '.join(found) or 'none'}"
                print(line, flush=True)
                refused |= row["refused"]
                is_worse |= bool(found)
            print("\n".join(f"  {code} refused: {reason}" for code, reason in sorted(refused.items())))
            print("\n".join(f"  edited: {each}" for each in made))
    return int(is_worse)
