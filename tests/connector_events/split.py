"""Splits a real recording of the lab, with both roles in one process, into files of several processes and nodes."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import kvfix
from kvfix_tools.lab.fuzz.schedule import draw
from tests import late

#: Seconds that the monotonic and the wall clock of a node are ahead.
CLOCKS = {"n0": (0.0, 0.0), "n1": (5000.0, -3.0), "n2": (-700.0, 40.0)}


Lines = dict[str, Any]


def recorded(connector: str, seed: int) -> str:
    """The recorder file of a schedule on the real scheduler in mode `check`."""
    os.environ["KVFIX_DUMP_DIR"] = tempfile.mkdtemp(prefix="kvfix-test-")
    kvfix.apply("check")
    assert late.play(draw(seed, connector, plain=True)).counts["loaded_tokens"] > 0
    from kvfix.connector_events import dump

    return Path(dump.write("exit")).read_text()


def on_node(
    path: Path, head: Lines, connectors: list[Lines], events: list[Lines], node: str, clocks: tuple[float, float]
) -> Path:
    """Write a recorder file of a process on this node, whose clocks are ahead by so many seconds."""
    mono, wall = (int(seconds * 1e9) for seconds in clocks)

    def moved(line: Lines) -> Lines:
        ahead = {"mono": mono, "wall": wall, "stepped": mono}
        return {**line, **{name: line[name] + more for name, more in ahead.items() if name in line}}

    head = {**moved(head), "node": node, "boot": f"boot of {node}", "began": 7}
    path.write_text("\n".join(map(json.dumps, [head, *map(moved, [*connectors, *events])])) + "\n")
    return path


def assert_between(clock: Any, true: float) -> None:
    """The bounds that common events give for the monotonic clock of a node, which is ahead by so many seconds."""
    assert clock.low <= clock.ahead <= clock.high
    assert clock.low <= int(true * 1e9) <= clock.high


class Split:
    """The lines of one recording, as files of separate processes for scheduler and ranks."""

    def __init__(self, text: str) -> None:
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        self._connectors = [line for line in self._lines if line["kind"] == "connector" and line["role"]]

    def number(self, role: str) -> int:
        (found,) = (line["number"] for line in self._connectors if line["role"] == role)
        return int(found)

    def events(self, role: str) -> list[dict[str, Any]]:
        number = self.number(role)
        return [line for line in self._lines if line["kind"] == "event" and line["connector"] == number]

    def whole(self, path: Path) -> Path:
        """Write the whole recording with one engine name: the lab's roles may have two."""
        lines = [{**line, "engine": "e", "replica": 0} if line in self._connectors else line for line in self._lines]
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return path

    def write(self, path: Path, role: str, rank: int, node: str, events: list[dict[str, Any]], **more: Any) -> Path:
        """Write a recorder file of this rank on this node; more: fields of the connector's line."""
        connector = next(line for line in self._connectors if line["role"] == role)
        connector = {**connector, "engine": "e", "replica": 0, "rank": rank, "ranks": 2, **more}
        head = {**self._lines[0], "pid": 99 if role == "SCHEDULER" else 100 + rank}
        return on_node(path, head, [connector], events, node, CLOCKS[node])
