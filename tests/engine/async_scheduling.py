"""Makes vLLM's engine on the CPU schedule asynchronously, which is its default on a GPU.

vLLM's CPU platform switches it off (cpu.py 0.32.0:331). Scheduler, queue of steps and runner have all that it takes,
but for the events and streams of CUDA by which the runner copies sampled tokens. Here the switch is put back, and
events and streams are stand-ins that do nothing: on the CPU a copy is done when it returns.

The forward pass runs inside `execute_model`, so the order of calls is that of a GPU: step N + 1 is scheduled and handed
to the worker before the scheduler has what step N has sampled. That the two overlap on a device is not played.
"""

from __future__ import annotations

from typing import Any

import torch

from kvfix_tools.roundtrip import cuda_stand_in


def switch_on() -> None:
    """Before the engine is made. Its LLM still needs `async_scheduling=True`."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked_for = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked_for

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    for name in ("Event", "Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, getattr(cuda_stand_in.CUDA, name))
