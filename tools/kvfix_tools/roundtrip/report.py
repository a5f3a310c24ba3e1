"""The report: a line of progress, a table for each backend, what is wrong in words, and JSON."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from statistics import median

import torch

from kvfix_tools.roundtrip import fixes
from kvfix_tools.roundtrip.backend import Backend
from kvfix_tools.roundtrip.cell import Cell
from kvfix_tools.roundtrip.inject import FAULTS
from kvfix_tools.roundtrip.known import known
from kvfix_tools.roundtrip.speed import Speed, plain
from kvfix_tools.roundtrip.trip import Result

#: Cells whose findings are told in full; the others are counted, and all are in the JSON.
TOLD = 5
BAD = ("failed", "crashed")


class Report:
    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device, self.options = device, options
        self.results: list[Result] = []
        self.speeds: list[Speed] = []
        self.skipped: dict[str, str] = {}
        self.fixes: list[str] = []

    def without(self, backend: Backend, why: str | None) -> bool:
        """Is the backend left out? Then it is said why."""
        if why:
            self.skipped[backend.name] = why
        return bool(why)

    def progress(self, done: int, of: int, cell: Cell) -> None:
        if not sys.stderr.isatty():
            return
        bar = ("#" * (24 * done // max(of, 1))).ljust(24, ".")
        line = f"[{bar}] {done}/{of} {cell.backend} {cell.layout} {cell.dtype}"
        print(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def add(self, result: Result) -> None:
        if result.store and result.load:
            result.plain_store, result.plain_load = plain(result.moved, self.device)
        self.results.append(result)

    def speed(self, speed: Speed) -> None:
        self.speeds.append(speed)
        if speed.result.verdict in BAD:
            self.results.append(speed.result)

    @property
    def code(self) -> int:
        if all(result.verdict == "refused" for result in self.results):
            return 77
        return int(any(result.verdict in BAD for result in self.results))

    def end(self) -> int:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        self.fixes = fixes.in_place()
        print(json.dumps(self.as_dict(), indent=2) if self.options.json else "\n".join(self.lines()))
        return self.code

    def as_dict(self) -> dict[str, object]:
        return {
            "device": name(self.device),
            "torch": str(torch.__version__),
            "seed": self.options.seed,
            "inject": self.options.inject,
            "fixes": self.fixes,
            "verified_bytes": self.verified,
            "skipped": self.skipped,
            "cells": [{**as_dict(result, self.options), "known": self._known(result)} for result in self.results],
            "speed": [speed.as_dict() for speed in self.speeds],
            "exit": self.code,
        }

    @property
    def verified(self) -> int:
        return sum(result.verified for result in [*self.results, *(speed.result for speed in self.speeds)])

    @property
    def _timed(self) -> bool:
        return any(map(rates, ([result] for result in self.results)))

    def lines(self) -> list[str]:
        lines = [f"{name(self.device)}, torch {torch.__version__}, seed {self.options.seed}"]
        here = [one for one in self.results if one.operations and one.cell.backend != "torch" and not of_engine(one)]
        lines += [f"kvfix's fixes: {', '.join(self.fixes) or 'none'}"] if here else []
        lines += ["GB/s of the median cell, and percent of a plain copy of as many bytes"] if self._timed else []
        lines += [f"{backend}: skipped: {why}" for backend, why in self.skipped.items()]
        for backend in dict.fromkeys(result.cell.backend for result in self.results):
            lines += ["", *self._table(backend)]
        for speed in self.speeds:
            lines += ["", *self._speed(speed)]
        lines += ["", *self._wrong()]
        return lines

    def _table(self, backend: str) -> list[str]:
        mine = [result for result in self.results if result.cell.backend == backend]
        lines = [f"{backend}: {', '.join(dict.fromkeys(result.operations for result in mine if result.operations))}"]
        rows = {layout: [one for one in mine if row(one) == layout] for layout in dict.fromkeys(map(row, mine))}
        cells = {layout: counted(here) for layout, here in rows.items()}
        width, most = max(map(len, rows)), max(map(len, cells.values()))
        for layout, here in rows.items():
            lines.append(f"  {layout:{width}}  {cells[layout]:{most}}  {rates(here)}".rstrip())
            bugs = dict.fromkeys(bug for result in here if (bug := known(result, self.fixes)))
            lines += [f"  {'':{width}}    known: {bug.bug}: {bug.says}" for bug in bugs]
            reasons = Counter(
                re.sub(r"\d{2,}|\d(?=[],])", "N", result.reason) if result.verdict == "crashed" else result.reason
                for result in here
                if result.reason
            )
            lines += [f"  {'':{width}}    {count} x {reason}" for reason, count in reasons.items()]
        return lines

    def _speed(self, speed: Speed) -> list[str]:
        backend, size = speed.result.cell.backend, speed.result.moved / (1 << 20)
        if speed.result.verdict == "refused":
            return [f"{backend}: not timed: {speed.result.reason}"]
        bare = speed.result.moved * (1 / speed.plain_store + 1 / speed.plain_load)
        lines = [
            f"{backend}: {size:.0f} MiB, {way} {rate / 1e9:.2f} GB/s, {100 * rate / beside:.0f} % of a plain "
            f"{'pinned ' if self.device.type == 'cuda' else ''}copy ({beside / 1e9:.2f} GB/s)"
            for way, rate, beside in (
                ("store", speed.store, speed.plain_store),
                ("load", speed.load, speed.plain_load),
            )
        ]
        times = speed.seconds / bare
        return [*lines, f"{backend}: checked in {speed.seconds:.2f} s, {times:.1f} times a plain copy there and back"]

    def _wrong(self) -> list[str]:
        wrong = [result for result in self.results if result.verdict in BAD]
        every = Counter(result.verdict for result in self.results)
        lines = []
        for result in wrong[:TOLD]:
            lines += [f"{result.verdict}: {command(result, self.options)}"]
            lines += [f"  {line}" for finding in result.findings for line in str(finding).splitlines()]
            lines += [f"  {result.reason}"] if result.reason else []
            lines.append("")
        classes: Counter[str] = sum((f.classes for result in wrong for f in result.findings), Counter())
        if classes:
            lines += ["wrong words of 8 bytes, by what they are:"]
            lines += [f"  {kind:20} {words:>10}" for kind, words in classes.most_common()] + [""]
        if self.options.inject:
            lines += [self._injected()]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in every.items()) or "nothing was checked"
        bugs = Counter(bug for result in wrong if (bug := known(result, self.fixes)))
        lines += [f"{count} of the {len(wrong)} are {bug.bug}. What to do: {bug.remedy}" for bug, count in bugs.items()]
        return [*lines, f"SUMMARY: {verdicts}; {self.verified / (1 << 20):.0f} MiB verified"]

    def _known(self, result: Result) -> str | None:
        bug = known(result, self.fixes)
        return bug and f"{bug.bug}: {bug.says}. What to do: {bug.remedy}"

    def _injected(self) -> str:
        tried = [result for result in self.results if result.verdict != "refused"]
        wanted = FAULTS[self.options.inject]
        caught = [r for r in tried if any(not wanted or wanted in finding.classes for finding in r.findings)]
        return f"{self.options.inject} was planted in {len(tried)} cells and named in {len(caught)}"


def counted(results: list[Result]) -> str:
    verdicts = Counter(result.verdict for result in results)
    return "  ".join(f"{verdicts[one]} {one}" for one in ("passed", *BAD, "refused") if verdicts[one])


def of_engine(result: Result) -> bool:
    return result.cell.backend.startswith("engine-")


def row(result: Result) -> str:
    if of_engine(result):
        return "greedy outputs"
    return f"race {result.race}" if result.race else result.cell.layout


def command(result: Result, options: argparse.Namespace) -> str:
    """One line that runs it again."""
    cell, planted = result.cell, [f"--inject {options.inject}"] * bool(options.inject)
    more = [*planted, *["--no-fixes"] * options.no_fixes]
    if of_engine(result):
        return " ".join([f"kvfix roundtrip --backend {cell.backend}", *more])
    if result.race:
        return " ".join([f"kvfix roundtrip --backend {cell.backend} --race {result.race} --seed {cell.seed}", *more])
    return cell.command("--gib 0", *more)


def as_dict(result: Result, options: argparse.Namespace) -> dict[str, object]:
    about = {
        field: getattr(result, field) for field in ("verdict", "reason", "race", "operations", "moved", "verified")
    }
    speeds = {
        name: result.moved / seconds / 1e9 if seconds else None
        for name, seconds in (
            ("store_gb_s", result.store),
            ("load_gb_s", result.load),
            ("plain_store_gb_s", result.plain_store),
            ("plain_load_gb_s", result.plain_load),
        )
    }
    findings = [
        {
            "check": one.stage,
            "first": one.first,
            "address": one.address,
            "words": one.words,
            "classes": dict(one.classes),
        }
        for one in result.findings
    ]
    again = {"cell": asdict(result.cell), "command": command(result, options)}
    return {**about, **speeds, **again, "findings": findings}


def rates(results: list[Result]) -> str:
    """GB/s each way of the median cell, and in percent of a plain copy of as many bytes."""
    timed = [result for result in results if result.verdict == "passed" and result.plain_load]
    if not timed:
        return ""
    said = []
    for way in ("store", "load"):
        rate = median(result.moved / getattr(result, way) for result in timed)
        beside = median(getattr(result, f"plain_{way}") / getattr(result, way) for result in timed)
        said.append(f"{way} {rate / 1e9:.2f} GB/s {100 * beside:.0f} %")
    return "  ".join(said)


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
