"""`make peers`: run vLLM's and LMCache's own tests without kvfix, with kvfix's fixes, and in mode strict.

    python -m maintain peers [lmcache|vllm] [--mode fix|strict] [--anew]

`--anew` runs the tests (.cache/peers) twice without kvfix. tests/peers/<dist>-<release>.json gets the number of passed
tests and lists all other tests. Without this file, `--anew` is the default. Tests that fail only with kvfix run again
in one process, once with and once without kvfix. exceptions.json names tests that must fail with kvfix. Exit 1 if a
named test does not fail, if an unnamed test again fails only with kvfix, or if a test that should pass was not run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from kvfix import catalogue, installed_source

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests/peers"
EXCEPTIONS = KEPT / "exceptions.json"
#: {dist: folders with tests of the scheduler, the connectors or the cache}
FOLDERS = {"vllm": ("tests/v1/kv_connector/unit", "tests/v1/core"), "lmcache": ("tests/v1",)}
#: Test files of each dist that `make peers` does not run, and the reasons.
LEFT_OUT: dict[str, dict[str, str]] = json.loads((KEPT / "left_out.json").read_text())
EVERYWHERE = {"lmcache.v1.memory_management"}  # nearly all tests import this module, so an import tells nothing
#: {model that the tests name: its configuration}. The tests read only the configuration of a model.
MODELS: dict[str, dict[str, Any]] = json.loads((KEPT / "models.json").read_text())


class Suite(NamedTuple):
    dist: str
    release: str
    folder: Path
    paths: list[str]

    @property
    def file(self) -> Path:
        """The path of the file with the result of the runs without kvfix (see `baseline`)."""
        return KEPT / f"{self.dist}-{self.release}.json"


def suite(dist: str) -> Suite:
    """Return the suite of this distribution. Raise SystemExit if the folder with the tests is missing."""
    release = installed_source.version(dist).partition("+")[0]
    folder = ROOT / ".cache/peers" / f"{dist}-{release}"
    if not folder.is_dir():
        raise SystemExit(f"make peers: there are no tests of {dist} {release} in {folder}: run requirements/peers")
    if dist == "vllm":
        return Suite(dist, release, folder, [*FOLDERS[dist], *(f"--ignore={path}" for path in LEFT_OUT[dist])])
    changed = {target.module for fix in catalogue.fixes() for target in fix.targets if target.dist == dist} - EVERYWHERE
    return Suite(dist, release, folder, importing(dist, folder, changed))


def importing(dist: str, folder: Path, modules: Iterable[str]) -> list[str]:
    """Return the test files that import one of these modules, except for files in LEFT_OUT."""
    ways = []
    for module in sorted(modules):
        package, _, name = module.rpartition(".")
        ways += [rf"{re.escape(module)}\b", rf"from {re.escape(package)} import [^\n]*\b{name}\b"]
    names = re.compile("|".join(ways))
    files = [path for place in FOLDERS[dist] for path in sorted((folder / place).rglob("test_*.py"))]
    found = [str(path.relative_to(folder)) for path in files if names.search(path.read_text())]
    return [path for path in found if path not in LEFT_OUT[dist]]


def hub(folder: Path) -> dict[str, str]:
    """Write MODELS into a cache of Hugging Face's hub. Return environment variables for this cache."""
    for model, config in MODELS.items():
        base = folder / "hub" / f"models--{model.replace('/', '--')}"
        files = {base / f"snapshots/{'0' * 40}/config.json": json.dumps(config), base / "refs/main": "0" * 40}
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                file.write_text(text)
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables for a process that runs the tests. folder: the folder for kvfix's dumps."""
    return {
        "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0",
        "KVFIX_DUMP_DIR": str(folder),
        "RAY_AUTH_MODE": "disabled",  # so that Ray leaves no token in ~/.ray for later clusters
    }  # fmt: skip


def run(suite: Suite, mode: str, tests: Iterable[str] = (), processes: int = 2) -> dict[str, str]:
    """Run tests (default: all). Return {test: passed, skipped or failed}. mode: kvfix's mode, or "" without kvfix."""
    with tempfile.TemporaryDirectory(prefix="kvfix-peers-") as place:
        outcomes = Path(place, "outcomes")
        env = {
            **{name: value for name, value in os.environ.items() if name != "KVFIX"},
            "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("patches", "tools")),
            "KVFIX_PEERS": json.dumps({"mode": mode, "outcomes": str(outcomes), "dist": suite.dist}),
            **hub(Path(place, "hf")),
            **environment(Path(place)),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "maintain.peers_plugin", "-p", "no:cacheprovider", "--tb=no",
            "--timeout=60", "-o", "log_cli=false", "-W", "ignore", "-n", str(processes), "--dist", "loadfile",
            *(tests or suite.paths),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=suite.folder, env=env, capture_output=True, text=True, check=False)
        found = read(outcomes)
    if not found:
        raise SystemExit(f"make peers: pytest ran nothing of {suite.dist}:\n{(done.stdout + done.stderr)[-3000:]}")
    return found


def read(file: Path) -> dict[str, str]:
    """Return {test: outcome} from the plugin's file. Each phase of a test has an outcome. The worst outcome counts."""
    order = ("passed", "skipped", "failed")
    found: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        name, _, outcome = line.rpartition("\t")
        found[name] = max(found.get(name, "passed"), outcome, key=order.index)
    return found


def take(suite: Suite) -> None:
    """Run the suite twice without kvfix. Write the result. `compare` expects a pass only of tests that passed twice."""
    first, again = run(suite, ""), run(suite, "")
    worse = {name: outcome for name, outcome in (*again.items(), *first.items()) if outcome != "passed"}
    passed = sum(outcome == "passed" for outcome in first.values()) - sum(first.get(name) == "passed" for name in worse)
    suite.file.parent.mkdir(exist_ok=True)
    suite.file.write_text(json.dumps({"passed": passed, "not passed": dict(sorted(worse.items()))}, indent=1) + "\n")


def baseline(suite: Suite) -> dict[str, Any]:
    """Return the result without kvfix: the number of "passed" tests, and the outcomes of the "not passed" tests."""
    return dict(json.loads(suite.file.read_text()))


def compare(suite: Suite, mode: str) -> dict[str, Any]:
    """Run the suite in this mode of kvfix. Return the tests that fail only with kvfix, and data for `show`."""
    begun, kept = time.monotonic(), baseline(suite)
    found = run(suite, mode)
    red = [name for name, outcome in found.items() if outcome == "failed" and name not in kept["not passed"]]
    if red:
        again, without = run(suite, mode, red, 1), run(suite, "", red, 1)
        red = [name for name in red if again.get(name) == "failed" and without.get(name) == "passed"]
    passed = [name for name, outcome in found.items() if outcome == "passed"]
    green = [name for name in passed if kept["not passed"].get(name) == "failed"]
    gone = max(0, kept["passed"] - sum(name not in kept["not passed"] for name in found))
    return {
        "dist": suite.dist, "release": suite.release, "mode": mode, "passed": len(passed), "red": sorted(red),
        "green": sorted(green), "not run": gone, "seconds": round(time.monotonic() - begun),
    }  # fmt: skip


def exceptions(dist: str, mode: str) -> dict[str, str]:
    """Return {name of a test, without pytest's parameters: why the test must fail in this mode}."""
    known = json.loads(EXCEPTIONS.read_text()) if EXCEPTIONS.exists() else []
    return {each["test"]: each["why"] for each in known if each["dist"] == dist and mode in each["modes"]}


def show(result: dict[str, Any]) -> None:
    head = f"{result['dist']} {result['release']}, {result['mode']}: {result['passed']} passed"
    print(f"{head}, {len(result['red'])} failed with kvfix only, {result['seconds']} s")
    for kind in ("expected failure", "new failure", "no longer fails"):
        for name, why in result[kind].items():
            print(f"  {kind}: {name}{f': {why}' if why else ''}")
    if result["not run"]:
        print(f"  {result['not run']} tests that pass without kvfix were not run")
    for name in result["green"]:
        print(f"  passes with kvfix only: {name}")


def main(
    dist: Annotated[Literal["lmcache", "vllm"] | None, typer.Argument()] = None,
    mode: Literal["fix", "strict"] | None = None,
    anew: Annotated[bool, typer.Option("--anew")] = False,
) -> int:
    results = []
    for each in map(suite, [dist] if dist else ("lmcache", "vllm")):
        if anew or not each.file.exists():
            print(f"{each.dist} {each.release}, without kvfix ...", file=sys.stderr)
            take(each)
        for acts in [mode] if mode else ("fix", "strict"):
            print(f"{each.dist} {each.release}, {acts} ...", file=sys.stderr)
            result = compare(each, acts)
            meant, red = exceptions(each.dist, acts), {name: name.partition("[")[0] for name in result["red"]}
            result["expected failure"] = {name: meant[test] for name, test in red.items() if test in meant}
            result["new failure"] = {name: "" for name, test in red.items() if test not in meant}
            result["no longer fails"] = {name: why for name, why in meant.items() if name not in red.values()}
            results.append(result)
            show(result)
    return int(any(result["new failure"] or result["no longer fails"] or result["not run"] for result in results))
