"""`make matrix`: run all scenarios with several vLLM releases and all LMCache releases, and write docs/matrix.json.

    make matrix                                  only new or changed pairs of releases
    python -m maintain scenario_matrix --again   all pairs

Each CPU core runs one vLLM release at a time. `requirements/matrix` makes the environments .cache/vllm/<release>. In
docs/matrix.json, a row of `outcomes` lists all LMCache releases that have the outcome. `code` is a digest of the source
code of the fixes and the lab.
"""

import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version

import kvfix
import kvfix_tools
from kvfix import installed_source
from kvfix_tools.lab.releases import code

FILE = Path("docs/matrix.json")
VLLM = Path(".cache/vllm")
#: Files that list the vLLM releases in .cache/vllm: releases built for the CPU, and releases without compiled files.
VLLM_RELEASES = Path("requirements/vllm-releases.txt"), Path("requirements/vllm-python-only.txt")
LMCACHE = Path(os.environ.get("KVFIX_TEST_RELEASES", ".cache/lmcache"))
#: The script that runs the scenarios of one vLLM release, in this release's environment.
PROCESS = Path(__file__).with_name("scenario_matrix_process.py")
LIMIT = 300  # maximum seconds for the import of vLLM, and for one pair, which usually takes ten seconds
#: {(vllm, lmcache): {"date", "python", "code", "outcomes"}}. A pair that cannot run has "why" instead of "outcomes".
Pairs = dict[tuple[str, str], dict[str, Any]]


def digest() -> str:
    """Return a digest of kvfix's source code that the outcomes depend on."""
    return hashlib.sha256(code().encode() + PROCESS.read_bytes()).hexdigest()[:12]


def load(text: str) -> Pairs:
    whole, pairs = json.loads(text), Pairs()
    for row in (*whole["runs"], *whole["outcomes"]):
        vllm, releases = row.pop("vllm"), row.pop("lmcache").split()
        for lmcache in releases:
            if "scenario" in row:
                pairs[vllm, lmcache]["outcomes"].append(dict(row))
            else:
                pairs[vllm, lmcache] = dict(row) if "why" in row else {**row, "outcomes": []}
    return pairs


def dump(pairs: Pairs) -> str:
    """Return the text of docs/matrix.json. Each line lists all LMCache releases to which the line's values apply."""
    runs, outcomes = dict[str, list[str]](), dict[str, list[str]]()
    for (vllm, lmcache), pair in sorted(pairs.items(), key=lambda each: (Version(each[0][0]), Version(each[0][1]))):
        run = {name: value for name, value in pair.items() if name != "outcomes"}
        runs.setdefault(json.dumps({"vllm": vllm, **run}), []).append(lmcache)
        for row in pair.get("outcomes", ()):
            outcomes.setdefault(json.dumps({"scenario": row["scenario"], "vllm": vllm, **row}), []).append(lmcache)

    def lines(rows: dict[str, list[str]]) -> str:
        merged = [json.dumps({**json.loads(row), "lmcache": " ".join(releases)}) for row, releases in rows.items()]
        return ",\n".join(merged)

    by_scenario = dict(sorted(outcomes.items(), key=lambda item: json.loads(item[0])["scenario"]))
    return f'{{"runs": [\n{lines(runs)}\n],\n"outcomes": [\n{lines(by_scenario)}\n]}}\n'


def deviations(pairs: Pairs) -> list[str]:
    found = []
    for (vllm, lmcache), pair in pairs.items():
        where = f"vLLM {vllm}, LMCache {lmcache}"
        if "why" in pair:
            found.append(f"{where}: {pair['why']}")
        for row in pair.get("outcomes", ()):
            if not row["as_expected"]:
                became = f"expected {row['expected']}, is {row['released']}, with fixes {row['fixed']}"
                found.append(f"{where}: {row['scenario']}: {became} {row.get('why', '')}".rstrip())
    return found


def environment(*first: Path) -> dict[str, str]:
    """Return the environment for a process that runs another vLLM without fixes. first: first paths of PYTHONPATH."""
    packages = [str(Path(package.__path__[0]).parent) for package in (kvfix, kvfix_tools)]
    others = {name: value for name, value in os.environ.items() if name != "KVFIX"}
    return {**others, "PYTHONPATH": os.pathsep.join([*map(str, first), *packages])}


def answer_of(python: Path, code: str, *first: Path) -> Any:
    """Run this code with this Python, and return the JSON in the last line of the output."""
    command = [str(python), "-c", code]
    done = subprocess.run(command, env=environment(*first), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def play(python: Path, releases: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all scenarios with this Python's vLLM and these LMCache releases. Yield (LMCache release, result)."""
    command = [str(python), "-m", f"maintain.{PROCESS.stem}", str(LIMIT), *(str(LMCACHE / name) for name in releases)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for release in releases:
            line = process.stdout.readline()
            if not line and process.wait() == -signal.SIGINT:
                return  # Ctrl-C: these releases are not played, so they get no row
            yield release, json.loads(line) if line else {"why": "the process of this vLLM ended"}


def main(again: Annotated[bool, typer.Option("--again")] = False) -> int:
    code, own = digest(), installed_source.version("vllm").partition("+")[0]
    pythons = {own: Path(sys.executable)}
    pythons |= {name: VLLM / name / "bin/python" for file in VLLM_RELEASES for name in file.read_text().split()}
    wanted = Path("requirements/lmcache-releases.txt").read_text().split()
    before = load(FILE.read_text()) if FILE.exists() else {}
    pairs = {pair: known for pair, known in before.items() if pair[0] in pythons and pair[1] in wanted}
    lock = threading.Lock()

    def play_all(vllm: str) -> None:
        stale = [name for name in wanted if again or pairs.get((vllm, name), {}).get("code") != code]
        for lmcache, answer in play(pythons[vllm], stale) if stale else ():
            about = {"date": datetime.date.today().isoformat(), "python": answer.pop("python", ""), "code": code}
            with lock:
                pairs[vllm, lmcache] = {**about, **answer}
                FILE.write_text(dump(pairs))
            wrong = len(deviations({(vllm, lmcache): pairs[vllm, lmcache]}))
            outcome = f"{wrong} not as expected" if wrong else "as expected"
            print(f"vLLM {vllm}, LMCache {lmcache}: {outcome}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(play_all, pythons))
    missing = [f"vLLM {vllm}, LMCache {name}" for vllm in pythons for name in wanted if (vllm, name) not in pairs]
    found = [*deviations(pairs), *(f"{pair}: not played" for pair in missing)]
    print("\n".join(found) or f"{len(pairs)} pairs, all as expected")
    return int(bool(found))
