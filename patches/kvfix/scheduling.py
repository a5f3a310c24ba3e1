"""Read vLLM's scheduler output and configuration in any release."""

from typing import Any


def resumed(scheduler_output: Any) -> Any:
    """Return the ids of the requests that this step resumes after a preemption (vLLM 0.11 has a list of booleans)."""
    cached = scheduler_output.scheduled_cached_reqs
    ids = getattr(cached, "resumed_req_ids", None)
    if ids is not None:
        return ids
    return [name for name, was in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if was]


def most_in_flight(config: Any) -> int:
    """Return the maximum number of scheduled steps whose output vLLM does not have yet."""
    batches: int | None = getattr(config, "max_concurrent_batches", None)  # since vLLM 0.26
    return batches or 1 + bool(config.scheduler_config.async_scheduling)
