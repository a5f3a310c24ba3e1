"""`make bench` measures all speeds and memory sizes that kvfix promises, in one run.

    python -m tests.bench [NAME ...]

A bench is a module of this folder whose function `measure` yields rows. A bench has no time limit. If a bench fails,
the other benches still show their results. Exit 1 if a bench failed, or a promise was not kept.
"""

import argparse
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module

from rich.console import Console
from rich.table import Table

import tests.bench
from tests.bench import Row


def main() -> int:
    names = {found.name for found in pkgutil.iter_modules(tests.bench.__path__)} - {"__main__"}
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(sorted(names)))
    chosen = parser.parse_args().names or sorted(names)
    if unknown := set(chosen) - names:
        parser.error(f"no bench is called {', '.join(sorted(unknown))}: {', '.join(sorted(names))}")
    failed: list[str] = []
    rows = list(measured(chosen, failed))
    table = Table("what", "measured", "compared with", "promise", "kept", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        kept = "[green]yes[/]" if row.kept else "[bold red]NO[/]"
        table.add_row(row.what, f"{row.measured:.3g} {row.unit}", row.context, row.promise, kept)
    Console().print(table)
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed) or not all(row.kept for row in rows))


def measured(names: list[str], failed: list[str]) -> Iterator[Row]:
    """Yield each row when the row is measured, until ctrl-c. If a bench fails, append the bench's name to `failed`."""
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr)
        try:
            for row in import_module(f"tests.bench.{name}").measure():
                print(f"  {row.what}: {row.measured:.3g} {row.unit}", file=sys.stderr)
                yield row
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
            traceback.print_exc()
            failed.append(name)
            if isinstance(error, KeyboardInterrupt):
                return


if __name__ == "__main__":
    sys.exit(main())
