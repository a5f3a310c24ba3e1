"""Run a program for maintainers: `python -m maintain PROGRAM [ARGUMENTS]`.

The function `main` of a program declares the program's arguments and options, and returns the exit code or None.
"""

import sys
from importlib import import_module

import typer

from kvfix_tools.command_options import end

PROGRAMS = (
    "connectors", "documentation.diagnose_picture", "drill", "fingerprints", "gpu.bundle", "knowledge", "language",
    "peers", "release", "released_findings", "scenario_matrix", "statements",
)  # fmt: skip

if __name__ == "__main__":
    program = "".join(sys.argv[1:2])
    if program not in PROGRAMS:
        sys.exit(f"Usage: python -m maintain PROGRAM [ARGUMENTS]\nPROGRAM is one of {', '.join(PROGRAMS)}")
    module = import_module(f"maintain.{program}")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, result_callback=end, rich_markup_mode=None)
    app.callback()(lambda: None)  # without a callback, Typer expects no program name if the app has only one program
    app.command(program, help=module.__doc__)(module.main)
    app(prog_name="python -m maintain")
