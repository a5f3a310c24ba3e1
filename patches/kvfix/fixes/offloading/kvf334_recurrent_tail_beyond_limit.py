"""EngineCore dies, or too many tokens are stored: OffloadingConnector does not keep to a request's store limit.

Symptom: EngineCore dies with a bare `AssertionError` at `assert boundary <= max_boundary` in
`_build_partial_tail_store_jobs` of offloading/scheduler.py. If the limit is 0, OffloadingConnector stores all tokens.
The limit is `max_offload_tokens` of a request, so any client that can reach the engine can cause the crash. The bug
needs layers of recurrent state (Mamba, `mamba_cache_mode` "align"), chunks of one block, and hits that may end within a
block (`prefix_match_unit`).

Cause: At the end of a prompt vLLM passes the block with the recurrent state to the connector. vLLM does not know the
limit, but the connector asserts that the block is not beyond the limit (offloading/scheduler.py 0.32.0:1443). The
connector treats a limit of 0 as no limit (:1437).

Fix: The fix hides each block beyond the request's limit from the connector.
- Remove when: `_build_partial_tail_store_jobs` compares each block with the limit, also if the limit is 0.
"""

from kvfix.fixes.api import OFFLOADING_SCHEDULER, Any, Fix, Steps, View, fix_around, stubs


@fix_around(when=lambda scheduler, output, *_, **__: output.kv_connector_block_state)
def keep_limit(scheduler: Any, scheduler_output: Any) -> Steps:
    state = scheduler_output.kv_connector_block_state
    offloads = state.boundary_state_offloads
    if not offloads:
        return (yield)
    limits = {name: getattr(scheduler._req_status.get(name), "max_offload_tokens", None) for name in offloads}
    within = {
        name: [entry for entry in entries if limits[name] is None or entry[2] <= limits[name]]
        for name, entries in offloads.items()
    }
    state = View(state, boundary_state_offloads=within)
    return (yield (View(scheduler_output, kv_connector_block_state=state),))


def shows_bug(hook: Any, module: Any) -> bool:
    """Pass a block with the state after token 40 of a request whose limit is 8. The bug raises AssertionError."""
    status = stubs.Stub(req=stubs.request(40, num_prompt_tokens=40), max_offload_tokens=8, group_states=())
    scheduler = stubs.Stub(
        _req_status={stubs.NAME: status}, _partial_tail_block_size=16, _cow_source_groups=frozenset(),
        config=stubs.Stub(supports_partial_tail=True, tokens_per_hash=8, kv_group_configs=()),
        _build_aligned_boundary_store_jobs=lambda handoffs: {},
    )  # fmt: skip
    handed = stubs.Stub(boundary_state_offloads={stubs.NAME: [(1, 9, 40)]})
    return stubs.raises(AssertionError, hook, scheduler, stubs.Stub(kv_connector_block_state=handed))


FIX = Fix(
    OFFLOADING_SCHEDULER._build_partial_tail_store_jobs(broken=">=0.32", probe=shows_bug, fix=keep_limit),
    effect="crash",
    evidence={"KVR011": r"^(schedule|build_connector_meta): AssertionError$", "KVD988": ""},
    proof="tests/lab/test_offloading.py, because no scenario can show the bug: the lab has no recurrent layers",
    no_patch={"vllm": "a client can end EngineCore: report the bug in vLLM's private channel first (SECURITY.md)"},
)
