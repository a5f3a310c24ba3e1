import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from maintain import release

#: Prefixes of environment variables that tell pip and git which servers to use. `shell` keeps only these variables.
_KEPT = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy")

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source archive in one folder, as `make release` does. Return the path of the wheel."""
    return release.build(tmp_path_factory.mktemp("dist"))[1]


@pytest.fixture(scope="session")
def checkout(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkout")
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (root,) = place.iterdir()
    return root


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Shell:
    """Install kvfix from `checkout`. Return a function that runs a shell command and asserts the exit code."""
    place = tmp_path_factory.mktemp("machine")
    home = place / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True, timeout=120)
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    environment = {
        **kept, "HOME": str(home), "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([str(place / "venv/bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
    }  # fmt: skip

    def run(line: str, folder: Path = home, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env={**environment, **more}, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run("pip install --quiet .", folder=checkout)
    return run
