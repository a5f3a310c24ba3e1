"""Stand-ins for CUDA on a machine without a GPU. Streams run work immediately. memmove replaces the driver's copies."""

import ast
import contextlib
import ctypes
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


class Stream:
    """A stand-in for a CUDA stream or event. All work of a stand-in is always complete."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def synchronize(self, *_: Any, **__: Any) -> None: ...

    record = wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Any) -> float:
        return 0.0


Event = Stream
#: Stand-ins for the attributes of `torch.cuda` and of vLLM's `current_platform` that the tested code uses.
CUDA = SimpleNamespace(
    Event=Event,
    Stream=Stream,
    stream=lambda stream: contextlib.nullcontext(),
    current_stream=lambda *_: Stream(),
    synchronize=lambda *_: None,
    is_xpu=lambda: False,
    is_rocm=lambda: False,
)


class Torch:
    """A replacement for `torch` in one module, with the stand-ins for streams and events."""

    cuda, Event = CUDA, Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Assertions(ast.NodeTransformer):
    """Remove assertions that a tensor or a device is on CUDA."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = ast.unparse(node.test)
        of_cuda = ".type == 'cuda'" in test or test.endswith((".is_cuda", ".is_xpu"))
        return ast.copy_location(ast.Pass(), node) if of_cuda else node


def on_cpu(module: ModuleType, **names: Any) -> None:
    """Remove the CUDA assertions from a module's functions. Keep the function objects. Set `names` in the module."""
    assert module.__file__
    tree = _Assertions().visit(ast.parse(Path(module.__file__).read_text()))
    again = dict(vars(module))
    exec(compile(tree, module.__file__, "exec"), again)
    for name, new in again.items():
        if getattr(new, "__module__", None) == module.__name__:
            _take_code(vars(module)[name], new)
    module.__dict__.update(torch=Torch(), **names)


def _take_code(old: Any, new: Any) -> None:
    """Give the code of `new` to `old`, which is a function or a class. The decorators of `old` stay in place."""
    if isinstance(new, type):
        for name, value in vars(new).items():
            _take_code(vars(old)[name], value)
        return
    old, new = (inspect.unwrap(getattr(function, "__func__", function)) for function in (old, new))
    if isinstance(new, FunctionType):
        old.__code__ = new.__code__


def copy_all(to: Iterable[int], source: Iterable[int], sizes: Iterable[int]) -> None:
    for one, other, size in zip(to, source, sizes, strict=True):
        ctypes.memmove(int(one), int(other), int(size))
