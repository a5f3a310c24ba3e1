"""The report of a run of `kvfix roundtrip`: progress, a table for each backend, descriptions of failures, and JSON."""

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import torch

from kvfix_tools.roundtrip.cell_check import Result, plain
from kvfix_tools.roundtrip.matrix import Cell
from kvfix_tools.roundtrip.planted_faults import FAULTS

SHOWN = 5  # maximum number of failed cells (test cases) to show in full. The JSON has all cells
BAD = ("failed", "crashed")


class KnownBug(NamedTuple):
    """A known bug. remedy: what the user can do. fix: code of its fix. If this fix is applied, the bug cannot occur."""

    bug: str
    effect: str
    remedy: str
    fix: str
    backends: tuple[str, ...]
    layouts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.bug}: {self.effect}"


KNOWN = (
    KnownBug(
        "LMCache issue 4463",
        "wrong KV from the packed layout of vLLM 0.26 and later",
        "kvfix run -- vllm serve ... (KVF020), or use LMCacheMPConnector",
        "KVF020",
        ("lmcache-v2", "lmcache-v3", "lmcache-engine"),
        ("packed", "packed-hnd", "packed-pool"),
    ),
    KnownBug(
        "layerwise loads mix up heads and tokens",
        "LMCache's torch operation for one layer reads HND as NHD",
        "kvfix run -- vllm serve ... (KVF021), or install an LMCache whose compiled operations can be imported",
        "KVF021",
        ("lmcache-layerwise",),
        ("hnd", "hnd-block-first"),
    ),
)


class RunReport:
    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device, self.options = device, options
        self.results: list[Result] = []
        self.speeds: list[Result] = []
        self.skipped: dict[str, str] = {}
        self.fixes: list[str] = []

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

    def add_speed(self, result: Result) -> None:
        self.speeds.append(result)
        if result.verdict in BAD:
            self.results.append(result)

    @property
    def code(self) -> int:
        return 77 if all(result.verdict == "refused" for result in self.results) else int(bool(self.wrong))

    @property
    def planted(self) -> tuple[int, int]:
        """Return (number of cells with the planted fault, number of cells in which the check found this fault)."""
        tried, kind = [result for result in self.results if result.verdict != "refused"], FAULTS[self.options.inject]
        return len(tried), sum(any(not kind or kind in each.classes for each in result.findings) for result in tried)

    @property
    def verified(self) -> int:
        return sum(result.verified for result in [*self.results, *self.speeds])

    def end(self) -> int:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        print(json.dumps(self.as_dict(), indent=2) if self.options.json else "\n".join(self.lines()))
        return self.code

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": name(self.device),
            "torch": str(torch.__version__),
            "seed": self.options.seed,
            "inject": self.options.inject,
            "fixes": self.fixes,
            "verified_bytes": self.verified,
            "skipped": self.skipped,
            "cells": [self._cell_as_dict(result) for result in self.results],
            "speed": [
                {
                    "backend": result.cell.backend,
                    "verdict": result.verdict,
                    "reason": result.reason,
                    "bytes": result.moved,
                    **{name: rate or 0.0 for name, rate in gb_per_second(result).items()},
                    "check_seconds": result.check_seconds,
                    "command": result.cell.command("--gib 0"),
                }
                for result in self.speeds
            ],
            "exit": self.code,
        }

    def lines(self) -> list[str]:
        lines = [f"{name(self.device)}, torch {torch.__version__}, seed {self.options.seed}"]
        here = [one for one in self.results if one.operations and one.cell.backend != "torch" and not of_engine(one)]
        lines += [f"kvfix's fixes: {', '.join(self.fixes) or 'none'}"] if here else []
        if rates(self.results):
            lines.append("Rates are medians of all cases, in GB/s. 100 % is the rate of a plain copy of the same size.")
        lines += [f"{backend}: not tested: {why}" for backend, why in self.skipped.items()]
        backends = dict.fromkeys(result.cell.backend for result in self.results)
        for table in (*map(self._table, backends), *map(self.speed, self.speeds)):
            lines += ["", *table]
        return [*lines, "", *self._wrong(), *self._summary()]

    def _cell_as_dict(self, result: Result) -> dict[str, object]:
        about = ("verdict", "reason", "race", "operations", "moved", "verified")
        bug = self.known(result)
        return {
            **{name: getattr(result, name) for name in about},
            **gb_per_second(result),
            "cell": asdict(result.cell),
            "command": self._command(result),
            "findings": [
                {"check": f.stage, "first": f.first, "address": f.address, "words": f.words, "classes": f.classes}
                for f in result.findings
            ],
            "known": bug and f"{bug}. Do: {bug.remedy}",
        }

    def _table(self, backend: str) -> list[str]:
        mine = [result for result in self.results if result.cell.backend == backend]
        lines = [f"{backend}: {operations(mine)}"]
        rows = {title: [one for one in mine if row(one) == title] for title in dict.fromkeys(map(row, mine))}
        cells = {title: counted(here) for title, here in rows.items()}
        width, most = max(map(len, rows)), max(map(len, cells.values()))
        for title, here in rows.items():
            lines.append(f"  {title:{width}}  {cells[title]:{most}}  {rates(here)}".rstrip())
            notes = [f"known: {bug}" for bug in dict.fromkeys(filter(None, map(self.known, here)))]
            reasons = Counter(
                re.sub(r"\d{2,}|\d(?=[],])", "N", result.reason) if result.verdict == "crashed" else result.reason
                for result in here
                if result.reason
            )
            notes += [f"{count} x {reason}" for reason, count in reasons.items()]
            lines += [f"  {'':{width}}    {note}" for note in notes]
        return lines

    def speed(self, result: Result) -> list[str]:
        backend, gigabytes = result.cell.backend, result.moved / 1e9
        if result.verdict == "refused":
            return [f"{backend}: not timed: {result.reason}"]
        pinned = "pinned " if self.device.type == "cuda" else ""
        ways = ("store", result.store, result.plain_store), ("load", result.load, result.plain_load)
        lines = [
            f"{backend}: {result.moved / (1 << 20):.0f} MiB, {way} {gigabytes / seconds:.2f} GB/s, "
            f"{100 * plain_copy / seconds:.0f} % of a plain {pinned}copy ({gigabytes / plain_copy:.2f} GB/s)"
            for way, seconds, plain_copy in ways
        ]
        times = f"{check_per_copy(result):.1f} times as long as a plain copy to the host and back"
        return [*lines, f"{backend}: checked in {result.check_seconds:.2f} s, {times}"]

    @property
    def wrong(self) -> list[Result]:
        return [result for result in self.results if result.verdict in BAD]

    def _wrong(self) -> list[str]:
        lines = []
        for result in self.wrong[:SHOWN]:
            details = "\n".join([*map(str, result.findings), result.reason]).splitlines()
            lines += [f"{result.verdict}: {self._command(result)}", *(f"  {line}" for line in details), ""]
        classes: Counter[str] = sum((f.classes for result in self.wrong for f in result.findings), Counter())
        if classes:
            lines += ["wrong words of 8 bytes, by class:"]
            lines += [f"  {kind:20} {words:>10}" for kind, words in classes.most_common()] + [""]
        return lines

    def _summary(self) -> list[str]:
        lines = []
        if self.options.inject:
            tried, named = self.planted
            lines += [f"{self.options.inject} was planted in {tried} cells and found in {named}"]
        bugs, failed = Counter(filter(None, map(self.known, self.wrong))), len(self.wrong)
        lines += [f"{count} of {failed} failed cells: {bug.bug}. Do: {bug.remedy}" for bug, count in bugs.items()]
        every = Counter(result.verdict for result in self.results)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in every.items()) or "nothing was checked"
        return [*lines, f"SUMMARY: {verdicts}; {self.verified / (1 << 20):.0f} MiB verified"]

    def known(self, result: Result) -> KnownBug | None:
        """Return the known bug that can explain a failed cell, or None. A bug whose fix is applied explains nothing."""
        cell = result.cell
        shown = (bug for bug in KNOWN if cell.backend in bug.backends and cell.layout in bug.layouts)
        return next((bug for bug in shown if bug.fix not in self.fixes), None) if result.verdict in BAD else None

    def _command(self, result: Result) -> str:
        cell, inject = result.cell, self.options.inject
        more = [*([f"--inject {inject}"] if inject else []), *(["--no-fixes"] if self.options.no_fixes else [])]
        if not of_engine(result) and not result.race:
            return cell.command("--gib 0", *more)
        race = [f"--race {result.race} --seed {cell.seed}"] if result.race else []
        return " ".join([f"kvfix roundtrip --backend {cell.backend}", *race, *more])


def operations(results: list[Result]) -> str:
    return ", ".join(dict.fromkeys(result.operations for result in results if result.operations))


def check_per_copy(result: Result) -> float:
    """Return the time of the whole check, divided by the time of one plain copy to the host and back."""
    return result.check_seconds / (result.plain_store + result.plain_load)


def counted(results: list[Result]) -> str:
    verdicts = Counter(result.verdict for result in results)
    return "  ".join(f"{verdicts[one]} {one}" for one in ("passed", *BAD, "refused") if verdicts[one])


def of_engine(result: Result) -> bool:
    return result.cell.backend.startswith("engine-")


def row(result: Result) -> str:
    if of_engine(result):
        return "greedy outputs"
    return f"race {result.race}" if result.race else result.cell.layout


def gb_per_second(result: Result) -> dict[str, float | None]:
    taken = {way: getattr(result, way) for way in ("store", "load", "plain_store", "plain_load")}
    return {f"{way}_gb_s": result.moved / seconds / 1e9 if seconds else None for way, seconds in taken.items()}


def rates(results: list[Result]) -> str:
    """Return the median GB/s of stores and loads, and the median percentage of a plain copy's speed."""
    timed = [result for result in results if result.verdict == "passed" and result.plain_load]
    if not timed:
        return ""
    ways = []
    for way in ("store", "load"):
        rate = median(result.moved / getattr(result, way) for result in timed)
        of_plain = median(getattr(result, f"plain_{way}") / getattr(result, way) for result in timed)
        ways.append(f"{way} {rate / 1e9:.2f} GB/s {100 * of_plain:.0f} %")
    return "  ".join(ways)


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
