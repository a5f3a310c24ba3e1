"""A machine of somebody who has just heard of kvfix: a fresh Python, an empty home, and kvfix on the index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: What tells pip and git where things are on this machine; the rest of the environment stays behind.
_KEPT = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy")

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


def built(root: Path, target: str, folder: Path) -> Path:
    """The sdist or wheel of this tree, built by the backend itself, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Shell:
    """Runs a line as a user types it. `pip install kvfix` finds the wheel; everything else comes from pip's index."""
    place = tmp_path_factory.mktemp("machine")
    home = place / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True, timeout=120)
    constraint = place / "constraint.txt"
    constraint.write_text(f"kvfix @ {wheel.as_uri()}\n")
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    environment = {
        **kept, "PIP_CONSTRAINT": str(constraint), "HOME": str(home), "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([str(place / "venv/bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
    }  # fmt: skip

    def run(line: str, folder: Path = home, timeout: int = 300, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line], cwd=folder, env={**environment, **more}, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    done = run("pip install --quiet kvfix")
    assert done.returncode == 0, done.stdout + done.stderr
    return run
