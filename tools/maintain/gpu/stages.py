"""Run the GPU checks on this host in stages, the most important stage first. Write each result when its stage ends.

A stage is a process that has a time limit, and prints a line of JSON for each step (class Steps). After a failed
stage, the next stage still runs. OUT/results.json has all results, and OUT/table.md has the rows for docs/gpu.md.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

NOT_HERE, TIMED_OUT = 77, 124
OUTCOMES = {0: "passed", 1: "FAILED", NOT_HERE: "not checked", TIMED_OUT: "TIMED OUT"}
KEPT = 20_000  # maximum number of characters to keep of a stage's messages


class Stage(NamedTuple):
    name: str
    limit: int  # seconds
    module: str
    arguments: tuple[str, ...]


#: {stage that runs `kvfix roundtrip`: its time limit in seconds}
ROUNDTRIPS = {
    "torch": 90, "torch-32-gib": 90, "lmcache": 60, "lmcache-released": 60, "lmcache-speed-released": 60,
    "lmcache-speed": 60, "vllm": 60, "engines": 180,
}  # fmt: skip
STAGES = (
    Stage("host", 90, "maintain.gpu.host", ()),
    *(Stage(name, limit, "maintain.gpu.roundtrips", (name,)) for name, limit in ROUNDTRIPS.items()),
    Stage("serve", 150, "maintain.gpu.serve", ("serve",)),
    Stage("verify", 150, "maintain.gpu.serve", ("verify",)),
)


class Steps:
    def __init__(self) -> None:
        self.right: list[bool] = []

    def add(self, what: str, right: bool, figures: str, **details: Any) -> None:
        """Print the result of a step as JSON. figures: the result in a few words. details: other data to keep."""
        self.right.append(right)
        print(json.dumps({"what": what, "right": right, "figures": figures, **details}), flush=True)

    @property
    def code(self) -> int:
        return int(not self.right or not all(self.right))


def device(arguments: list[str]) -> tuple[str, str]:
    """Return (name of the stage, its device). If the device is missing, end the process with exit code 77."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--device", required=True)
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none", file=sys.stderr)
        sys.exit(NOT_HERE)
    return options.name, options.device


def run(stage: Stage, device: str, slower: int) -> dict[str, Any]:
    """Run a stage and return the result. After `slower` * `limit` seconds, kill the stage (exit TIMED_OUT)."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", stage.module, *stage.arguments, "--device", device],
            stdout=out, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=stage.limit * slower)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:  # end the stage's engines and servers too, which are in the stage's process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        steps = [json.loads(line) for line in _lines(out) if line.startswith("{") and line.endswith("}\n")]
        messages = "".join(_lines(errors))[-KEPT:]
    seconds = round(time.monotonic() - start, 1)
    return {"stage": stage.name, "exit": code, "seconds": seconds, "steps": steps, "messages": messages}


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.readlines()


def outcome(result: dict[str, Any]) -> str:
    return OUTCOMES.get(result["exit"], f"CRASHED ({result['exit']})")


def figures(result: dict[str, Any]) -> str:
    """Return the figures of all steps. If the stage exits with 77 or has no steps, return its last line on stderr."""
    last = (result["messages"].strip().splitlines() or ["no output"])[-1]
    if result["exit"] == NOT_HERE:
        return str(last)
    return "; ".join(f"{step['what']}: {step['figures']}" for step in result["steps"]) or last


def table(results: list[dict[str, Any]]) -> str:
    head = ["| stage | outcome | figures | seconds |", "|---|---|---|---|"]
    rows = [f"| {r['stage']} | {outcome(r)} | {figures(r).replace('|', '/')} | {r['seconds']:.0f} |" for r in results]
    return "\n".join([*head, *rows, ""])


def main(arguments: list[str], stages: tuple[Stage, ...] = STAGES) -> int:
    """Return 0 if no stage failed, 77 if no stage could be checked, else 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", action="store_true", help="run only the stages that have no result in OUT")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the scripts without a GPU")
    parser.add_argument("--slower", type=int, default=1, metavar="N", help="multiply the time limits by N")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    done: dict[str, dict[str, Any]] = {}
    if options.resume and file.exists():
        done = {each["stage"]: each for each in json.loads(file.read_text()) if each["exit"] != NOT_HERE}
    for stage in stages:
        if stage.name in done:
            print(f"{stage.name:22} done before")
            continue
        result = done[stage.name] = run(stage, options.device, options.slower)
        results = [done[each.name] for each in stages if each.name in done]
        file.write_text(json.dumps(results, indent=1))
        (options.out / "table.md").write_text(table(results))
        print(f"{stage.name:22} {outcome(result):12} {result['seconds']:5.0f} s  {figures(result)}", flush=True)
    codes = {result["exit"] for result in done.values()}
    return NOT_HERE if codes == {NOT_HERE} else int(bool(codes - {0, NOT_HERE}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
