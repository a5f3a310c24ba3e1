"""Load broken or crashing compiled extensions in a child process. In most tests, a fake package replaces torch."""

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvfix_tools.doctor import extensions
from tests.conftest import RELEASES
from tests.diagnose.lines import site_packages
from tests.doctor.sites import V1, look, machine, problems, say, serve, site, torch

TORCH = """
__version__ = "2.99.0+cu130"
class version:
    cuda, hip = {cuda!r}, None
class cuda:
    is_available = staticmethod(lambda: False)
"""
SYMBOL = "_ZN3c105ErrorC2ENS_14SourceLocationE"


def make(folder: Path, files: dict[str, bytes], cuda: str | None = "13.0") -> Path:
    (folder / "lmcache").mkdir(parents=True)
    (folder / "lmcache/__init__.py").touch()
    for name, content in files.items():
        (folder / "lmcache" / name).write_bytes(content)
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(TORCH.format(cuda=cuda))
    return folder


def library() -> bytes:
    return Path(msgspec._core.__file__).read_bytes()


def without(content: bytes) -> bytes:
    """Replace a Python symbol that the library imports by a C++ symbol that no library has."""
    for name in (b"PyObject_GetAttr", b"PyUnicode_FromStringAndSize"):
        at = content.find(b"\0" + name + b"\0")
        if at >= 0:
            return content[: at + 1] + SYMBOL.encode()[: len(name)] + content[at + 1 + len(name) :]
    raise AssertionError("the library has none of these symbols")


def for_cuda_12() -> bytes:
    """Return LMCache 0.3.10's c_ops for CUDA 12, changed to need the missing library libcudaX, not torch's libc10."""
    return next((RELEASES / "0.3.10/lmcache").glob("c_ops*.so")).read_bytes().replace(b"libc10.so\0", b"libcudaX.\0")


C_OPS = f"c_ops{EXTENSION_SUFFIXES[0]}"


@pytest.mark.parametrize(
    ("file", "content", "cuda", "status", "what"),
    [
        (C_OPS, library, "13.0", "ok", "lmcache.c_ops loads with torch 2.99.0+cu130"),
        (C_OPS, lambda: without(library()), "13.0", "problem",
         "lmcache.c_ops is not built for torch 2.99.0+cu130 (undefined symbol _ZN3c105Error"),
        (C_OPS, lambda: b"\x7fELF no", "13.0", "problem", "lmcache.c_ops does not load with torch 2.99.0+cu130"),
        (C_OPS, for_cuda_12, "13.0", "problem", "lmcache.c_ops needs libcuda"),
        (C_OPS, for_cuda_12, None, "unchecked", "lmcache.c_ops needs libcuda"),  # torch is built for the CPU
        ("c_ops.cpython-37m-x86_64-linux-gnu.so", library, "13.0", "problem", "c_ops is built for another Python"),
        ("no_ops.so", library, "13.0", "problem", "has no compiled operations (cuda_ops or c_ops)"),
    ],
)  # fmt: skip
def test_a_library(file: str, content: Any, cuda: str | None, status: str, what: str, tmp_path: Path) -> None:
    first, *_ = say(look(serve(V1), make(tmp_path, {file: content()}, cuda)), "extensions")
    assert first.status == status
    assert what in first.what
    assert ("kvfix explain KVD7" in first.do) == (status == "problem" and "another Python" not in what)


def test_a_torch_for_the_cpu_needs_no_compiled_operations(tmp_path: Path) -> None:
    assert say(look(serve(V1), make(tmp_path, {}, None)), "extensions") == []


ALL = ["_C", "_C_AVX2", "_C_AVX512"]
AVX2 = "fpu sse2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "builds", "loaded"),
    [
        (AVX2, ALL, "_C_AVX2"),
        (f"{AVX2} avx512f", ALL, "_C_AVX2"),
        (AVX512, ALL, "_C_AVX512"),
        (f"{AVX512} avx512_bf16", ALL, "_C"),
        (AVX512, ALL[:2], "_C"),  # an earlier release of vLLM has no _C_AVX512
        (AVX2, ALL[:1], "_C"),  # vLLM for a GPU has one build
        ("", ALL[:2], "_C"),  # the processor is not an x86
    ],
)
def test_the_build_for_this_processor(flags: str, builds: list[str], loaded: str, tmp_path: Path) -> None:
    place = tmp_path / "site/vllm"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    for each in [*builds, "_C_stable_libtorch"]:
        (place / f"{each}.abi3.so").touch()
    setup = look(serve(V1), place.parent, machine(tmp_path / "root", flags=flags))
    assert [file.name for file in setup.libraries] == [f"{loaded}.abi3.so", "_C_stable_libtorch.abi3.so"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="vLLM has these builds for x86")
def test_what_vllm_loads_without_avx512(tmp_path: Path) -> None:
    """On a processor without AVX-512, vLLM loads its AVX2 build. An AVX-512 build would crash with SIGILL."""
    setup = look(serve(V1), site_packages(), machine(tmp_path, flags=AVX2))
    said = [(line.status, line.what.partition(" with ")[0]) for line in say(setup, "extensions")]
    assert ("ok", "vllm._C_AVX2 loads") in said
    assert "vllm._C loads" not in [what for _, what in said]


def test_a_build_for_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = look(serve(V1), make(tmp_path, {C_OPS: library()}))
    (file,) = setup.libraries
    tried = extensions.Tried({"version": "2.13.0", "cuda": None}, {str(file): "crashed with SIGILL"}, "")
    monkeypatch.setattr(extensions, "attempt", lambda *_: tried)
    (found,) = problems(setup, "extensions")
    assert found.what == "lmcache.c_ops has instructions that this processor does not have (SIGILL)"
    assert "torch" not in found.do


def test_a_crash_is_an_answer_and_the_others_are_tried(tmp_path: Path) -> None:
    make(tmp_path, {C_OPS: library()})
    (tmp_path / "crashing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "failing.py").write_text("raise RuntimeError('no device')")
    (tmp_path / "quiet.py").touch()
    tried = extensions.attempt([str(tmp_path)], [], ["crashing", "failing", "quiet"])
    assert tried.errors == {"crashing": "crashed with SIGSEGV", "failing": "RuntimeError: no device", "quiet": ""}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("raise OSError('libcudart.so.13')", "import torch fails: OSError: libcudart.so.13"),
        ("import os; os.abort()", "import torch crashed with SIGABRT"),
    ],
)
def test_a_torch_that_does_not_import(text: str, what: str, tmp_path: Path) -> None:
    make(tmp_path, {C_OPS: library()})
    (tmp_path / "torch/__init__.py").write_text(text)
    assert what in problems(look(serve(V1), tmp_path), "extensions")[0].what


def test_what_takes_too_long_is_not_checked(tmp_path: Path) -> None:
    make(tmp_path, {})
    (tmp_path / "torch/__init__.py").write_text("import threading; threading.Event().wait()")
    assert extensions.attempt([str(tmp_path)], [], [], limit=0.5) == (None, {}, "loading did not finish in 0.5 s")


def test_a_gpu_that_torch_cannot_use(tmp_path: Path) -> None:
    folder = make(tmp_path / "site", {})
    where = machine(tmp_path / "root")
    assert problems(look(serve(V1), folder, where), "gpu") == []
    (tmp_path / "root/dev/nvidiactl").touch()
    assert "cannot use the GPU of this machine" in problems(look(serve(V1), folder, where), "gpu")[0].what


@pytest.mark.parametrize(("version", "count"), [("2.13.0", 0), ("2.13.0+cu130", 0), ("2.12.1", 1)])
def test_the_torch_that_vllm_is_built_for(version: str, count: int, tmp_path: Path) -> None:
    found = problems(look(serve(V1), torch(site(tmp_path, lmcache=""), version)), "torch")
    assert len(found) == count
    assert all('pip install "torch==2.13.0' in line.do for line in found)
