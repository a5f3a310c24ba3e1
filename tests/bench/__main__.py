"""`make bench`: measure every speed that kvfix promises, relative to another tool or the unpatched code, in one run.

    python -m tests.bench [NAME ...]

A bench is a module of this folder with `measure()`, which yields rows. It has no time limit. Results are shown even if
another bench fails. Exit 1 if a bench failed, or a promise was not kept.
"""

import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from rich.console import Console
from rich.table import Table

from tests.bench.row import Row

Bench = Callable[[], Iterable[Row]]


def main(arguments: list[str]) -> int:
    names = [
        found.name
        for found in pkgutil.iter_modules(import_module("tests.bench").__path__)
        if found.name not in ("row", "engine_logs", "__main__")
    ]
    unknown = set(arguments) - set(names)
    if unknown:
        print(f"no bench {', '.join(sorted(unknown))}; known: {', '.join(names)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    benches = ((name, import_module(f"tests.bench.{name}").measure) for name in arguments or names)
    rows = list(measured(benches, failed))
    show(rows)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or not all(row.kept for row in rows))


def measured(benches: Iterable[tuple[str, Bench]], failed: list[str]) -> Iterator[Row]:
    """Rows as they come, until ctrl-c. The names of benches that fail are added to `failed`."""
    for name, measure in benches:
        print(f"measuring {name} ...", file=sys.stderr)
        try:
            for row in measure():
                print(f"  {row.what}: {row.measured:.3g} {row.unit}", file=sys.stderr)
                yield row
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            traceback.print_exc()
            failed.append(name)
            if isinstance(error, KeyboardInterrupt):
                return


def show(rows: list[Row]) -> None:
    table = Table("what", "measured", "compared with", "promise", "kept", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        kept = "[green]yes[/]" if row.kept else "[bold red]NO[/]"
        table.add_row(row.what, f"{row.measured:.3g} {row.unit}", row.context, row.promise, kept)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
