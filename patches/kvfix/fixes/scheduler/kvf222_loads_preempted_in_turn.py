"""A prefill engine makes no progress: loads hold all blocks, and each request in turn needs one more and is preempted.

Symptom: The log alternates between `Running: 0 reqs` and `Running: 1 reqs`. There is no throughput and no error, and
`Preemptions` grows. The bug needs all of these conditions:

- a prefill engine (role kv_producer) that generates more than one token
- asynchronous scheduling (the default) or several pipeline stages
- a second connector that loads between steps, in addition to the connector that sends KV to decode
- a full KV cache

Cause: vLLM admits a load if the blocks for its prompt are free (scheduler.py 0.32.0:1249). The first generated token
may need one more block. If no block is free, vLLM preempts the request while the last step of its prompt is in flight.
With a connector that must send the KV to decode (`requires_kv_delivery`), vLLM drops the token that this step generates
(:836). So the request loads again, into the blocks that vLLM has freed. Then vLLM preempts another loaded request.

The bug does not affect role kv_both. With kv_both, vLLM preempts no request with a step in flight (`defer_block_free`).
With speculative decoding there is no bug, because a load leaves blocks free (`_spec_decode_step_blocks`).

Fix: In an engine with the bug, a load leaves one block free in each KV group if there are other requests. One of the
requests gets this block for its first token.

Mixed roll-out: Engines with and without the fix work together. The fix is opt-in because it may delay a load.
- Releases: vLLM 0.32.0 and 0.33.0. 0.26.0 has the same function, but keeps the token, so the fix does nothing there.
- Remove when: `schedule` admits a load only if its first generated token fits, or keeps a preempted request's token.
"""

from kvfix.fixes.api import SCHEDULER, Any, Fix, fix_after, stubs


@fix_after()
def reserve_one_more(scheduler: Any, reserved: int) -> int:
    """Reserve one more block in each KV group. vLLM calls the fixed function before each admission of a load."""
    may_drop_token = (
        getattr(scheduler, "requires_kv_delivery", False)
        and not scheduler.defer_block_free
        and not scheduler._spec_decode_step_blocks
        and scheduler.vllm_config.max_concurrent_batches > 1
        and (scheduler.running or scheduler._inflight_prefills)
    )
    return reserved + len(scheduler.kv_cache_manager.coordinator.single_type_managers) if may_drop_token else reserved


def shows_bug(hook: Any, module: Any) -> bool:
    """Reserve blocks while one request runs. With the bug, no block is reserved."""
    scheduler = stubs.Stub(
        requires_kv_delivery=True, defer_block_free=False, _spec_decode_step_blocks=0, running=[None],
        _inflight_prefills=set(), vllm_config=stubs.Stub(max_concurrent_batches=2),
        kv_cache_manager=stubs.Stub(coordinator=stubs.Stub(single_type_managers=(None,))),
    )  # fmt: skip
    return bool(hook(scheduler) == 0)


FIX = Fix(
    SCHEDULER._inflight_prefill_reserved_blocks(broken=">=0.26", probe=shows_bug, fix=reserve_one_more),
    effect="hang",
    changes_healthy=("nixl-offload",),  # with few free blocks, a load begins later
    opt_in=True,
)
