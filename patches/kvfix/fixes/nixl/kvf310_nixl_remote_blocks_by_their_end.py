"""Wrong text with NixlConnector: KV is shifted if prefill has more blocks, as vLLM pairs lists from their end.

Symptom: Requests return wrong text without a message. The bug occurs if the prefill engine has generated more than one
token, or has computed a different prompt than the decode engine. If the prefill engine has fewer blocks than the decode
engine needs, the decode engine's worker dies with `AssertionError` in `_apply_prefix_caching`.

Cause: After a prefix hit, `_apply_prefix_caching` takes the blocks for the rest of the prompt from the end of the
prefill engine's list (base_worker.py 0.32.0:3455). The pairs are right only if the lists of both engines end at the
same token. If the router does not set `max_tokens` to 1, generated tokens may add blocks to prefill's list.

Fix: Before a read, the fix cuts the prefill engine's list after the prompt's last block. If the prefill engine's list
is too short, the fix reports the load as failed, and vLLM applies `kv_load_failure_policy`. The fix does nothing if
context parallelism is on, if the engines have different block sizes, or for KV groups without full attention.
- Remove when: vLLM pairs the blocks by their position in the prompt.
"""

from kvfix.fixes import _nixl
from kvfix.fixes.api import NIXL_PULL_WORKER, PRIVATE, Any, Fix, Steps, fix_around, note, stubs


@fix_around(when=lambda worker, req_id, meta: any(meta.local_block_ids), on_fault=_nixl.fail_load)
def pair_from_start(worker: Any, req_id: str, meta: Any) -> Steps:
    engine, remote, own = meta.remote.engine_id, list(meta.remote.block_ids), meta.local_block_ids
    is_malformed = len(remote) != len(own) or not all(isinstance(group, (list, tuple)) for group in remote)  # KVF311
    if is_malformed or engine not in worker._remote_agents or not meta.local_num_computed_blocks:
        return (yield)  # only vLLM's tests pass metadata without the number of computed blocks
    for number, (spec, blocks) in enumerate(zip(worker._group_spec_types, own, strict=True)):
        wanted = meta.local_num_computed_blocks[number] + len(blocks)
        if blocks and _nixl.has_full_attention(spec) and len(remote[number]) != wanted:
            if not _same_blocks(worker, engine):
                return (yield)
            if len(remote[number]) < wanted:
                return _nixl.fail_load(worker, req_id)
            remote[number] = list(remote[number][:wanted])
            note(__name__, f"request {req_id}: blocks after its prompt are not read")
            meta.remote.block_ids = remote
    return (yield)


def _same_blocks(worker: Any, engine: str) -> bool:
    """Return True if blocks have the same size in both engines, and no block is split over workers."""
    remote = worker.transfer_topo.get_engine_info(engine)
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block, worker.dcp_size
    theirs = remote.remote_block_size, remote.remote_physical_blocks_per_logical, remote.remote_dcp_size
    return bool(ours == theirs and ours[2] == 1)


def shows_bug(hook: Any, module: Any) -> bool:
    """Load two blocks from a prefill instance that has three. With the bug, the worker reads the last two blocks."""
    read = stubs.Calls(True)
    engine = stubs.Stub(remote_block_size=16, remote_physical_blocks_per_logical=1, remote_dcp_size=1, remote_tp_size=1)
    topo = stubs.Stub(get_engine_info=lambda _: engine, tp_ratio=lambda _: 1, block_size_ratio=lambda _: 1)
    plan = stubs.Stub(all_source_ranks=(0,), source_ranks_per_group=((0,),), local_consumers=1)
    worker = _nixl.worker_side(
        transfer_topo=topo, tp_mappings={"p": plan}, _remote_agents={"p": {(0, 0): "a"}}, _mixed_mem_types=False,
        dst_region_group_ids={"p": [0]}, region_group_ids=[0], _group_spec_types=(type("FullAttentionSpec", (), {}),),
        src_xfer_handles_by_block_size={16: 1}, dst_xfer_side_handles={"p": {0: 2}}, _read_blocks=read,
    )  # fmt: skip
    hook(worker, stubs.NAME, _nixl.load([7, 8, 9], [1, 2]))
    specs = [kwargs["read_spec"] if "read_spec" in kwargs else args[0] for args, kwargs in read]
    return [spec.remote_block_ids for spec in specs] != [[[7, 8]]]


FIX = Fix(
    NIXL_PULL_WORKER._read_blocks_for_req(broken=">=0.32", probe=shows_bug, fix=pair_from_start),
    effect="wrong output",
    evidence={"KVR011": r"^start_load_kv: AssertionError"},
    scenarios=("nixl-prefill-generates-more", "nixl-prefill-has-fewer-blocks"),
    no_patch=PRIVATE,
)
