"""`kvfix run -- CMD`: write the choice of fixes into the environment, then become the program CMD."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import kvfix
from kvfix.config import Config
from kvfix_tools.command_options import MODES, Only, Plus, Skip, flag

BOOTSTRAP = Path(kvfix.__file__).with_name("bootstrap")
_AUDIT = """With --mode check: vLLM computes this fraction of the hits, and kvfix compares the computed KV with the
cache."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD ...", help="The program and its arguments.")],
    mode: Annotated[str, typer.Option(help=f"{MODES} strict: also raise on a violation.")] = "fix",
    only: Only = None,
    skip: Skip = None,
    plus: Plus = None,
    layers: Annotated[bool, flag("--layers", "Also record the hooks that run once per layer.")] = False,
    audit: Annotated[float, typer.Option(help=_AUDIT)] = 0,
) -> int:
    """Run a program, such as `vllm serve` or `lmcache server`, with kvfix in all its processes."""
    # The program replaces this process. Return only on failure: 2 for wrong options, 126 or 127 as a shell does.
    try:
        choice = Config(mode, only, skip, layers, plus, audit)
    except ValueError as error:
        print(f"kvfix run: {error}", file=sys.stderr)
        return 2
    program = shutil.which(command[0])
    if program is None:
        print(f"kvfix run: {command[0]}: no such program on PATH", file=sys.stderr)
        return 127
    if not Config.is_off(os.environ.get("KVFIX")):
        kvfix.apply(choice.mode, choice.only, choice.skip, choice.layers, choice.plus, choice.audit)
    else:
        print("kvfix run: KVFIX=off is set, so the program runs unpatched. To patch it: unset KVFIX", file=sys.stderr)
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place != str(BOOTSTRAP)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *(place for place in places if place)])
    try:
        os.execv(program, list(command))
    except OSError as error:
        print(f"kvfix run: {program}: {error.strerror}", file=sys.stderr)
        return 126
