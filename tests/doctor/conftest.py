"""Installations that several tests look at and none changes."""

from pathlib import Path

import pytest

from tests.doctor.sites import site


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest LMCache, and the installed vLLM."""
    return site(tmp_path_factory.mktemp("newest"))
