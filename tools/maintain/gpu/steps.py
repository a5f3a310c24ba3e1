"""For the process of a stage: read its device, and print a line of JSON for each of its steps."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

NOT_HERE = 77


class Steps:
    """The steps of one stage so far."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add(self, what: str, right: bool, figures: str, **details: Any) -> None:
        """Print a step. figures: its result in a few words. details: other data to keep."""
        self.right.append(right)
        print(json.dumps({"what": what, "right": right, "figures": figures, **details}), flush=True)

    @property
    def code(self) -> int:
        return int(not self.right or not all(self.right))


def device(arguments: list[str]) -> tuple[str, str]:
    """Return (name of the stage, its device). Ends the process if the device is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--device", required=True)
    options = parser.parse_args(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none", file=sys.stderr)
        sys.exit(NOT_HERE)
    return options.name, options.device
