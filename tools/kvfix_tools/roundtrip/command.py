"""The command `kvfix roundtrip`. It uses argparse instead of typer, so that it needs no package except torch."""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from kvfix_tools.roundtrip import backends, races
from kvfix_tools.roundtrip.backends import Backend
from kvfix_tools.roundtrip.cell_check import REPEATS, CellCheck, Refused, Result, everywhere, plain
from kvfix_tools.roundtrip.element import SECOND, WORD, too_large
from kvfix_tools.roundtrip.matrix import AXES, Axes, Cell, pairs
from kvfix_tools.roundtrip.planted_faults import FAULTS, plant
from kvfix_tools.roundtrip.region import BAND
from kvfix_tools.roundtrip.run_report import RunReport

OK, USAGE, NOT_HERE = 0, 2, 77
Job = Callable[[Result], Result]
Work = list[tuple[Backend, list[Cell]]]  # the chosen backends, each with its cells (test cases)
#: If a backend cannot run a cell, the backend raises one of these exceptions before it moves KV.
REFUSALS = (Refused, NotImplementedError, ValueError, AssertionError)
#: KV sizes of a model with 8 billion parameters. Each token has 128 KiB of KV in bfloat16.
MODEL = {"dtype": "bfloat16", "heads": "8", "layers": 32, "head_size": 128, "block": "16", "chunk": "256"}
DEFAULT_GIB = {"cpu": 1 / 32, "cuda": 4.0}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="kvfix roundtrip",
        description="Copy KV with known values to host memory and back, and check every byte.",
        epilog="Exit codes: 0 every byte is right, 1 a byte is wrong or a case crashed, 2 usage error, 77 no test ran.",
    )
    add = options.add_argument
    backend = "test these copy routines (see --list). Default: all but engine-*. Default with --race or --inject: torch"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="use this device; auto: CUDA if present")
    add("--backend", nargs="+", metavar="NAME", help=backend)
    for name, values in AXES.items():
        free = name in ("tokens", "block", "chunk", "heads")
        skip = "tokens to skip at the start of a load. part: 1 token and half a block. chunk: a chunk and half a block"
        shown = f"{skip if name == 'skip' else 'test only these values'}; default: {', '.join(values)}"
        add(f"--{name}", nargs="+", metavar="VALUE", choices=None if free else values, help=shown)
    add("--layers", type=int, default=3, help="number of layers of the KV cache (default: 3)")
    add("--head-size", type=int, default=32, help="number of elements of a head (default: 32)")
    add("--full", action="store_true", help="test every combination, not only every pair of values")
    add("--race", nargs="*", metavar="NAME", help=f"test only races; without a NAME: {', '.join(races.RACES)}")
    add("--gib", type=float, help="copy this many GiB to measure the speed, 0 for none (default: 4 on CUDA, else 1/32)")
    add("--seed", type=int, default=0, help="draw slots and values with this seed (default: 0)")
    add("--inject", choices=tuple(FAULTS), help="plant this fault to test kvfix roundtrip; exit 1: kvfix found it")
    add("--no-fixes", action="store_true", help="test LMCache and vLLM as released, without the fixes of kvfix")
    add("--json", action="store_true", help="print JSON")
    add("--list", action="store_true", help="list the backends, and the packages or devices that they lack here")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        print(f"kvfix roundtrip: no CUDA device is visible to torch {torch.__version__}", file=sys.stderr)
        return NOT_HERE
    if options.device == "auto":
        options.device = "cuda" if cuda else "cpu"
    if options.list:
        for one in backends.all_backends().values():
            print(f"{one.name:18} {one.missing(torch.device(options.device)) or one.summary}")
        return OK
    try:
        work = chosen(options)
    except ValueError as error:
        print(f"kvfix roundtrip: {error}", file=sys.stderr)
        return USAGE
    return run(options, work).end()


def chosen(options: argparse.Namespace) -> Work:
    """Return the backends and their cells. Raise ValueError for wrong options."""
    is_self_test = options.inject is not None or options.race is not None
    default = ["torch"] if is_self_test else ["torch", "lmcache", "lmcache-engine", "vllm"]
    if unknown := set(options.race or ()) - set(races.RACES):
        raise ValueError(f"no race {min(unknown)}. List the races: kvfix roundtrip --help")
    return [(one, choose(one, options)) for one in backends.named(options.backend or default)]


def run(options: argparse.Namespace, work: Work) -> RunReport:
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())  # LMCache needs the device's index
    report = RunReport(device, options)
    with contextlib.ExitStack() as stack:
        if any(one.name != "torch" for one, _ in work):
            stack.enter_context(fixes(not options.no_fixes))
        report.skipped = {one.name: why for one, _ in work if (why := one.missing(device))}
        here = [(one, cells) for one, cells in work if one.name not in report.skipped]
        if device.type == "cpu":  # several threads would be slower, because cells are small
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        every = list(jobs(here, device, options))
        for number, (result, job) in enumerate(every):
            report.progress(number, len(every), result.cell)
            report.add(guarded(result, job))
        timed = options.gib != 0 and options.race is None and options.inject is None
        for one in [one for one, _ in here if timed and not one.whole]:
            report.progress(len(every), len(every), Cell(one.name))
            report.add_speed(measure(one, device, options.gib, options.seed))
        kvfix = sys.modules.get("kvfix")
        report.fixes = sorted({row.code for row in kvfix.status() if row.verdict == "applied"}) if kvfix else []
    return report


@contextlib.contextmanager
def fixes(wanted: bool) -> Iterator[None]:
    """Apply kvfix's fixes in this process and its children. KVFIX in the environment sets the mode (off: no fixes)."""
    try:
        import kvfix
    except ImportError:
        yield
        return
    before = os.environ.get("KVFIX")
    kvfix.revert()
    if wanted and before != "off":
        kvfix.apply((before or "fix").partition(" ")[0])
    else:
        os.environ["KVFIX"] = "off"
    logger = logging.getLogger("kvfix")
    logger.addFilter(_warnings)
    try:
        yield
    finally:
        logger.removeFilter(_warnings)
        kvfix.revert()
        if before is not None:
            os.environ["KVFIX"] = before


def _warnings(record: logging.LogRecord) -> bool:
    """Drop records below WARNING, because these records only name applied fixes. The report names the fixes too."""
    return record.levelno >= logging.WARNING


def jobs(work: Work, device: torch.device, options: argparse.Namespace) -> Iterator[tuple[Result, Job]]:
    events = options.inject != "missing-event"
    if options.race is None and events:
        for one, cells in work:
            for cell in cells:
                yield Result(cell), partial(one.whole or partial(check_cell, one, options.inject), device)
    some = any(getattr(options, axis) for axis in AXES)  # True if an option selects cells
    if options.race is not None or not events or not (some or options.inject):
        for one, _ in work:
            cell = Cell(one.name, layers=options.layers, head_size=options.head_size, seed=options.seed)
            for name in [name for name in options.race or races.RACES if name in races.of(one.name)]:
                yield Result(cell, race=name), partial(races.run, name, cell, device, events)


def check_cell(one: Backend, fault: str | None, device: torch.device, result: Result) -> Result:
    check = CellCheck(result.cell, device, result)
    transfer = one.open(check)
    if fault:
        plant(fault, transfer, check)
    return check.run(transfer)


def guarded(result: Result, job: Job) -> Result:
    """Run a job. If it raises an exception, return the findings so far, and the exception as one line."""
    try:
        return job(result)
    except Exception as error:  # noqa: BLE001 - any error of the backend is reported
        verdict = "failed" if result.findings else "refused" if isinstance(error, REFUSALS) else "crashed"
        reason = " ".join(str(error).split())
        if not isinstance(error, Refused):
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"({Path(last.filename).name}:{last.lineno})"
            reason = f"{type(error).__name__}{': ' + reason if reason else ''} {place}"
        return replace(result, verdict=verdict, reason=reason)


def measure(backend: Backend, device: torch.device, gib: float | None, seed: int) -> Result:
    """Time and verify a large transfer of a backend, and time plain copies of this size. Keep the fastest times."""
    cell = Cell(backend.name, layout="nhd", slots="blocks", seed=seed, **MODEL)  # type: ignore[arg-type]
    wanted, chunk = (DEFAULT_GIB[device.type] if gib is None else gib) * (1 << 30), int(cell.chunk)
    # torch rounds pinned memory up to a power of two. So the KV and its guard bands must fit into the wanted size.
    chunks = max(1, int(wanted // (cell.geometry().token_bytes(chunk) + 2 * BAND * WORD)))
    cell = replace(cell, tokens=str(chunks * chunk))
    try:
        check = CellCheck(cell, device)
        transfer = backend.open(check)
        check.prepare(transfer)
        check.cache.fill(everywhere(SECOND))  # not FIRST, so that check.run() finds a copy that does nothing
        for _ in range(REPEATS):
            check.store(transfer)
            check.load(transfer)
        start = time.perf_counter()
        result = check.run(transfer, brief=True)
        result.check_seconds = time.perf_counter() - start
        del check, transfer  # frees their memory
    except (*REFUSALS, RuntimeError) as error:
        return Result(cell, "refused", reason=str(error))
    result.plain_store, result.plain_load = plain(result.moved, device)
    return result


def choose(one: Backend, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a backend. A whole engine has only one cell. Raise ValueError for impossible sizes."""
    axes: Axes = {name: tuple(getattr(options, name) or one.axes.get(name, values)) for name, values in AXES.items()}
    made = pairs(one.name, axes, options.seed)
    if options.full:
        every = itertools.product(*axes.values())
        made = [Cell(one.name, **dict(zip(axes, values, strict=True))) for values in every]  # type: ignore[arg-type]
    cells = [replace(cell, layers=options.layers, head_size=options.head_size, seed=options.seed) for cell in made]
    for cell in cells:
        sizes = cell.geometry()
        wrong = too_large(sizes.layers, sizes.slots, sizes.heads, sizes.row_words)
        if wrong or cell.count < 1:
            raise ValueError(wrong or f"{cell.count} tokens")
    if one.whole:
        return [Cell(one.name, seed=options.seed)] if options.inject is None else []
    return cells
