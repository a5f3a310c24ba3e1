"""A user's program without kvfix: it generates, round after round. Run as `python attached.py JOB.json`.

The job: `transfer` and `engine`, as serve.py has them; `calm` and `hard`: requests of a round; `flags`: a folder. A
round is hard as long as the file `hard` is in it, and the last once the file `stop` is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine


def main(job: dict[str, Any]) -> None:
    llm = real_engine.make(Path(job["model"]), job["transfer"], **job["engine"])
    folder = Path(job["flags"])
    rounds: list[tuple[str, list[list[int]]]] = []
    preempted = 0
    while not (folder / "stop").exists():
        kind = "hard" if (folder / "hard").exists() else "calm"
        rounds.append((kind, real_engine.generate(llm, job[kind])))
        preempted = real_engine.counter(llm, "vllm:num_preemptions")
        print(f"{kind} round {len(rounds)} ended", flush=True)
    Path(job["out"]).write_text(json.dumps({"rounds": rounds, "preemptions": preempted}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
