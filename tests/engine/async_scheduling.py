"""Turn on asynchronous scheduling, the default on a GPU, for vLLM's engine on the CPU.

vLLM's CPU platform turns it off (cpu.py 0.32.0:331). Scheduler, queue of steps and runner support it, but the runner
copies sampled tokens with CUDA events and streams. These are replaced by stand-ins that do nothing: on the CPU a copy
ends when it returns.

The order of calls is that of a GPU: step N + 1 is scheduled and given to the worker before the scheduler has the tokens
of step N. The two steps do not overlap, because the forward pass runs inside `execute_model`.
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
