"""Makes vLLM's engine on the CPU schedule asynchronously, which is its default on a GPU.

vLLM's CPU platform switches it off (cpu.py 0.32.0:331). Scheduler, queue of steps and runner have all that it takes,
but for the events and streams of CUDA by which the runner copies sampled tokens. Here the switch is put back, and
events and streams are stood in for by some that do nothing: on the CPU a copy is done when it returns.

The forward pass runs inside `execute_model`, so the order of calls is that of a GPU: step N + 1 is scheduled and handed
to the worker before the scheduler is told what step N has said. That the two overlap on a device is not played.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Event:
    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    def wait_stream(self, stream: Stream) -> None:
        pass


def switch_on() -> None:
    """Before the engine is made. Its LLM is still to be told `async_scheduling=True`."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked_for = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked_for

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
