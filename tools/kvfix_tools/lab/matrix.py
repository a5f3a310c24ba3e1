"""All scenarios under several vLLM releases with all LMCache releases, as data: docs/matrix.json.

    make matrix                                   what is new or has changed since it was written
    python -m kvfix_tools.lab.matrix --again      all of it

`requirements/matrix` has made the environments, .cache/vllm/<release>; the vLLM that runs this is played as well.
In the file, a row of `outcomes` holds for all its LMCache releases; `code` is a digest of the fixes and the lab.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from packaging.version import Version

import kvfix
import kvfix_tools
from kvfix import target

FILE = Path("docs/matrix.json")
VLLM = Path(".cache/vllm")
LMCACHE = Path(os.environ.get("KVFIX_TEST_RELEASES", ".cache/lmcache"))
#: Seconds for one pair; one takes about ten, and vLLM is imported before the first.
LIMIT = 300

#: {(vllm, lmcache): {"date", "python", "code", and "outcomes" or, where it could not be played, "why"}}
Pairs = dict[tuple[str, str], dict[str, Any]]


def digest() -> str:
    """Of all that the outcomes depend on, but vLLM and LMCache: the fixes and the lab."""
    package, tools = Path(kvfix.__path__[0]), Path(kvfix_tools.__path__[0], "lab")
    files = [path for folder in (package, tools) for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    contents = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(files))
    return hashlib.sha256(contents).hexdigest()[:12]


def load(text: str) -> Pairs:
    """The pairs of a file."""
    whole, pairs = json.loads(text), Pairs()
    for run in whole["runs"]:
        for lmcache in run["lmcache"].split():
            told = {name: value for name, value in run.items() if name not in ("vllm", "lmcache")}
            pairs[run["vllm"], lmcache] = told if "why" in told else {**told, "outcomes": []}
    for row in whole["outcomes"]:
        for lmcache in row["lmcache"].split():
            outcome = {name: value for name, value in row.items() if name not in ("vllm", "lmcache")}
            pairs[row["vllm"], lmcache]["outcomes"].append(outcome)
    return pairs


def dump(pairs: Pairs) -> str:
    """One line for all LMCache releases of which the same is to be said; sorted, so that a difference can be read."""
    runs: dict[str, list[str]] = {}
    outcomes: dict[str, list[str]] = {}
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
    """What did not come out as it must, a line each."""
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


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    """All lines, and "" where it ends."""
    for line in stream:
        lines.put(line)
    lines.put("")


def play(python: Path, lmcache: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each LMCache release under the vLLM of this interpreter."""
    here = os.pathsep.join(str(Path(package.__path__[0]).parent) for package in (kvfix, kvfix_tools))
    clean = {name: value for name, value in os.environ.items() if name != "KVFIX"}
    process = subprocess.Popen(
        [str(python), "-m", "kvfix_tools.lab.pairs", str(LIMIT)],
        env={**clean, "PYTHONPATH": here}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    answers: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, answers), daemon=True).start()
    try:
        for release in lmcache:
            line = ""
            try:
                print(LMCACHE / release, file=process.stdin, flush=True)
                line = answers.get(timeout=2 * LIMIT)
            except queue.Empty:
                process.kill()  # the others find it gone
            except BrokenPipeError:
                pass
            yield release, json.loads(line) if line else {"why": "the process of this vLLM ended"}
    finally:
        process.kill()
        process.wait()


def main(arguments: list[str]) -> int:
    code, own = digest(), target.version("vllm").partition("+")[0]
    pythons = {own: Path(sys.executable)}
    for release in Path("requirements/vllm-releases.txt").read_text().split():
        pythons[release] = VLLM / release / "bin" / "python"
    wanted = Path("requirements/lmcache-releases.txt").read_text().split()
    before = load(FILE.read_text()) if FILE.exists() else {}
    pairs = {pair: told for pair, told in before.items() if pair[0] in pythons and pair[1] in wanted}
    for vllm, python in pythons.items():
        stale = [name for name in wanted if "--again" in arguments or pairs.get((vllm, name), {}).get("code") != code]
        for lmcache, answer in play(python, stale) if stale else ():
            told = {"date": datetime.date.today().isoformat(), "python": answer.pop("python", ""), "code": code}
            pairs[vllm, lmcache] = {**told, **answer}
            FILE.write_text(dump(pairs))
            wrong = len(deviations({(vllm, lmcache): pairs[vllm, lmcache]}))
            came = f"{wrong} not as expected" if wrong else "as expected"
            print(f"vLLM {vllm}, LMCache {lmcache}: {came}", file=sys.stderr, flush=True)
    missing = [f"vLLM {vllm}, LMCache {name}" for vllm in pythons for name in wanted if (vllm, name) not in pairs]
    found = [*deviations(pairs), *(f"{pair}: not played" for pair in missing)]
    print("\n".join(found) or f"{len(pairs)} pairs, all as expected")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
