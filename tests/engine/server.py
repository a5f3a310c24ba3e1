"""A real `lmcache server`, started by `kvfix run`: it loads no vLLM plugin."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import engines
from tests.conftest import ROOT, clean_environment


@contextmanager
def server(lmcache: Path | None = None) -> Iterator[dict[str, Any]]:
    """vLLM's kv_transfer_config for LMCacheMPConnector with this server. lmcache: folder of 0.4.6; else the newest."""
    start = (sys.executable, "-m", "kvfix_tools.cli", "run", "--")
    environment = clean_environment()
    transfer_mode = engines.ANY_MODE
    if lmcache:
        places = [str(place) for place in (lmcache, ROOT / "patches", ROOT / "tools")]
        environment["PYTHONPATH"] = os.pathsep.join(places)
        transfer_mode = ("--transfer-mode", "non_gpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        engines.server(Path(folder) / "log", 64, environment, start, transfer_mode) as transfer,
    ):
        yield transfer
