"""A real `lmcache server`, started by `kvfix run`: it loads no vLLM plugin."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, clean_environment


@contextmanager
def server(lmcache: Path | None = None) -> Iterator[dict[str, Any]]:
    """vLLM's kv_transfer_config for LMCacheMPConnector with this server. lmcache: folder of 0.4.6; else the newest."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "kvfix_tools.cli", "run", "--", str(Path(sys.executable).with_name("lmcache"))]
    command += ["server", "--port", str(port), "--http-port", str(http_port), "--chunk-size", "64"]
    command += ["--l1-size-gb", "0.5", "--eviction-policy", "LRU"]
    command += ["--transfer-mode", "non_gpu"] if lmcache else ["--supported-transfer-mode", "auto"]
    settings = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    if lmcache:
        places = [str(place) for place in (lmcache, ROOT / "patches", ROOT / "tools")]
        settings["PYTHONPATH"] = os.pathsep.join(places)
    process = subprocess.Popen(
        [*command, "--disable-observability"],
        env=clean_environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "LMCache cache server is running" in line:
                break
        else:
            pytest.fail("the lmcache server ended:\n" + "".join(seen[-20:]))
        with (
            open(os.devnull, "wb") as nowhere,
            subprocess.Popen(["cat"], stdin=process.stdout, stdout=nowhere) as drain,
        ):
            extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
            yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
            process.terminate()
            process.wait(timeout=60)
            drain.wait(timeout=60)
    finally:
        process.kill()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
