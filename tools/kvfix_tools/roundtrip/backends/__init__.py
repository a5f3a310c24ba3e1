"""Find the backends. Every module in this folder lists its backends in a tuple BACKENDS."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvfix_tools.roundtrip.cell_check import CellCheck, Result, Transfer
from kvfix_tools.roundtrip.matrix import Axes


class Backend(NamedTuple):
    name: str
    summary: str
    open: Callable[[CellCheck], Transfer]  # returns the Transfer of one cell (one test case), or raises Refused
    missing: Callable[[torch.device], str | None] = lambda device: None  # why the backend cannot be used here, or None
    group: str = ""  # a name for several backends
    axes: Axes = {}  # {axis: values to test by default}
    whole: Callable[[torch.device, Result], Result] | None = None  # checks a complete engine instead of cells


def all_backends() -> dict[str, Backend]:
    """Return {name: backend}. The backends' modules import vLLM and LMCache only when a backend is used."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {backend.name: backend for module in modules for backend in module.BACKENDS}


def named(names: list[str]) -> list[Backend]:
    """Return the backends with these names and groups, each once. Raise ValueError for an unknown name."""
    every, found = all_backends(), dict[str, Backend]()
    for name in names:
        here = [backend for backend in every.values() if name in (backend.name, backend.group)]
        if not here:
            raise ValueError(f"no backend {name}. List the backends: kvfix roundtrip --list")
        found.update({backend.name: backend for backend in here})
    return list(found.values())
