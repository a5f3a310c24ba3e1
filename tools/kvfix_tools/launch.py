"""`kvfix run -- CMD`: write the choice of fixes into the environment, then become the program CMD."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import kvfix
from kvfix.config import Config

BOOTSTRAP = Path(kvfix.__file__).with_name("bootstrap")


def run(
    command: Sequence[str],
    mode: str,
    only: Sequence[str] | None,
    skip: Sequence[str] | None,
    layers: bool,
    plus: Sequence[str] | None = None,
    audit: float = 0,
) -> int:
    """Replace this process by the program. Return only on failure: 2 for wrong options, 126 or 127 as a shell does."""
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
