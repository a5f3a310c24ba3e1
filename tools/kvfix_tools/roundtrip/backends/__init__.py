"""What a backend is, and which there are: every module here has a tuple BACKENDS and is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip.cell_check import CellCheck, Result, Transfer
from kvfix_tools.roundtrip.matrix import Axes


class Backend(NamedTuple):
    """`open` makes the transfer of one cell, or raises Refused. `missing`: why it cannot be used on this device at
    all, or None. `group`: another name to ask for it by, together with its like. `axes`: what it is for, of the values
    of an axis; others are only tried if they are asked for. `whole`: one check in place of all cells; it fills in a
    result."""

    name: str
    summary: str
    open: Callable[[CellCheck], Transfer]
    missing: Callable[[torch.device], str | None] = lambda device: None
    group: str = ""
    axes: Axes = {}
    whole: Callable[[torch.device, Result], Result] | None = None


def all_backends() -> dict[str, Backend]:
    """{name: backend}; importing their modules imports nothing but torch."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {backend.name: backend for module in modules for backend in module.BACKENDS}


def named(names: list[str]) -> list[Backend]:
    """Those of these names and groups, each once. Raises ValueError for a name that is neither."""
    every, found = all_backends(), dict[str, Backend]()
    for name in names:
        here = [backend for backend in every.values() if name in (backend.name, backend.group)]
        if not here:
            raise ValueError(f"no backend {name}; --list names them")
        found.update({backend.name: backend for backend in here})
    return list(found.values())
