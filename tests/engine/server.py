"""A real `lmcache server`, started by `kvfix run`: it loads no vLLM plugin."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import engines
from tests.conftest import clean_environment


@contextmanager
def server() -> Iterator[dict[str, Any]]:
    """vLLM's kv_transfer_config for LMCacheMPConnector with this server."""
    start = (sys.executable, "-m", "kvfix_tools.cli", "run", "--")
    with (
        tempfile.TemporaryDirectory() as folder,
        engines.server(Path(folder) / "log", 64, clean_environment(), start) as transfer,
    ):
        yield transfer
