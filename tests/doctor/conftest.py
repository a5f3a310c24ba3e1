"""Installations that several tests look at and none changes."""

from pathlib import Path

import pytest

from tests.doctor.sites import site


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest LMCache, and the installed vLLM."""
    return site(tmp_path_factory.mktemp("newest"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest LMCache, without vLLM."""
    return site(tmp_path_factory.mktemp("place"), vllm=False)
