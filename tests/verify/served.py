"""A real vLLM server with a small model and a tokenizer, for `kvfix verify`. Its connector can be told to fail.

A fault is planted in the server: the file `fault` names it, and the connector of the test suite reads it at each load
(tests/engine/plugin/kvfix_engine_verify.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvfix_tools.roundtrip import real_engine
from tests.conftest import PLUGIN, ROOT, Fresh
from tests.engine import pd

CHUNK = 64
SIZES = {"max-model-len": 1024, "num-gpu-blocks-override": 257, "max-num-batched-tokens": 512}
#: LMCache in process, with its own GPU connector on CPU tensors. It reads the fault.
FAULTY = {"kv_connector": "Faulty", "kv_connector_module_path": "kvfix_engine_verify"}
IN_PROCESS = {**real_engine.in_process(CHUNK), **FAULTY}
OFFLOADING = {
    "kv_connector": "Offloading", "kv_connector_module_path": "kvfix_engine_verify_offload", "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}  # fmt: skip


class Served(pd.Engine):
    options = ["--enable-prompt-tokens-details"]
    places = (PLUGIN, ROOT)

    def __init__(self, folder: Path, mode: str, transfer: dict[str, Any] | str | None, **environment: str) -> None:
        """transfer: kv_transfer_config. environment: more of the server's."""
        super().__init__(folder, "kv_both", mode)
        self.transfer = transfer or {}
        self.fault_file = folder / "fault"
        self.environment.update(
            KVFIX_TEST_REPORT=str(folder / "report"),
            KVFIX_TEST_REAL_CONNECTOR="1",
            KVFIX_TEST_FAULT=str(self.fault_file),
            VLLM_SERVER_DEV_MODE="1",
            **environment,
        )

    def plant(self, fault: str) -> None:
        """ "" plants none."""
        self.fault_file.write_text(fault)

    @contextmanager
    def running(self, **sizes: int) -> Iterator[Served]:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_model(self.folder.parent / "model")
        self.plant("")
        try:
            self.start(**{**SIZES, **sizes})
            self.until_started()
            yield self
        finally:
            self.kill()


def write_model(folder: Path) -> None:
    """A tokenizer with a token for each byte."""
    if (folder / "config.json").exists():
        return
    real_engine.write_model(folder, "float32", {})
    real_engine.write_tokenizer(folder)


def verify(*arguments: str) -> tuple[int, str]:
    """Run `kvfix verify` and return its exit code and output."""
    done = Fresh(1000).run([sys.executable, "-m", "kvfix_tools.cli", "verify", *arguments])
    return done.returncode, done.stdout + done.stderr
