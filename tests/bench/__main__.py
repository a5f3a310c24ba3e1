"""`make bench`: every speed that kvfix promises, beside its peer or the unpatched code, measured in one run.

    python -m tests.bench [NAME ...] [--json]

A bench is a module of this folder with `measure()`, which yields rows. Exit 1 if a promise was not kept.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from importlib import import_module

from rich.console import Console
from rich.table import Table

from tests.bench.row import Row


def main(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    wanted = [name for name in arguments if name != "--json"]
    names = [
        found.name
        for found in pkgutil.iter_modules(import_module("tests.bench").__path__)
        if found.name not in ("row", "__main__")
    ]
    unknown = set(wanted) - set(names)
    if unknown:
        print(f"no bench {', '.join(sorted(unknown))}; known: {', '.join(names)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for name in wanted or names:
        print(f"measuring {name} ...", file=sys.stderr)
        rows += import_module(f"tests.bench.{name}").measure()
    if as_json:
        print(json.dumps([{**row._asdict(), "kept": row.kept} for row in rows], indent=2))
    else:
        show(rows)
    return int(not all(row.kept for row in rows))


def show(rows: list[Row]) -> None:
    table = Table("what", "measured", "beside", "promise", "kept", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        kept = "[green]yes[/]" if row.kept else "[bold red]NO[/]"
        table.add_row(row.what, f"{row.measured:.3g} {row.unit}", row.beside, row.promise, kept)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
