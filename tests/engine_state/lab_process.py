"""An engine in a separate process: the lab's real scheduler and connectors, in a loop like EngineCore's.

Run as `python -m tests.engine_state.lab_process NAME`; it prints a line when it is in that state, and goes on.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from kvfix_tools.lab import runner


class EngineCore:
    """In place of vLLM's, which needs a model. A step takes a hundredth of a second and more."""

    model_executor = None

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.scheduler = lab.scheduler

    def run_busy_loop(self, busy: bool) -> None:
        number = 0
        while True:
            if busy and len(self.scheduler.requests) < 4:
                number += 1
                self._lab.admit(f"busy{number}", [number % 400 + 1] * 90, max_tokens=50)
            self._lab.step()
            if number < 3:
                print("runs", flush=True)
            time.sleep(0.01)


def main(name: str) -> None:
    runner.prepare(None)
    from vllm.distributed.kv_transfer import kv_transfer_state

    from tests.engine_state import wedged

    lab = getattr(wedged, name)()
    kv_transfer_state._KV_CONNECTOR_AGENT = lab.connector.workers[0].in_worker
    EngineCore(lab).run_busy_loop(busy=name == "empty_engine")


if __name__ == "__main__":
    main(sys.argv[1])
