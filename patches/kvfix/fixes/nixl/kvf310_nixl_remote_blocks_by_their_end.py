"""Wrong text with NixlConnector: blocks are paired from their end, and KV is shifted if prefill has more blocks.

## Symptom
Requests return wrong text without any message. This happens if the prefill engine has generated more than one token, or
has had another prompt. If the prefill engine has fewer blocks than the decode engine needs, the decode engine's worker
dies with `AssertionError` in `_apply_prefix_caching`.

## Cause
A decode engine that has a prefix hit needs only the blocks of the rest of the prompt. `_apply_prefix_caching` takes
this number of blocks from the end of the prefill engine's list (base_worker.py 0.32.0:3461). This is right only if both
lists end at the same token. A router may let the prefill engine generate more than one token, if the router does not
set `max_tokens` to 1. If the generated tokens need a new block, the prefill engine has one block more.

## Fix
Before a read, the fix pairs the blocks from the beginning, after the prefix hit, and does not read blocks beyond the
prompt. If there are too few blocks, the load fails, and `kv_load_failure_policy` decides. The fix does not handle KV
groups other than full attention, engines with different block sizes, or context parallelism.

## Releases
vLLM 0.32.0 and 0.33.0. Earlier releases were not tested.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM pairs the blocks by their position in the prompt.
"""

from types import SimpleNamespace
from typing import Any

from kvfix.acting import note
from kvfix.fixes import _nixl, stubs
from kvfix.fixes.api import PRIVATE, Fix, Steps, fix_around
from kvfix.fixes.targets import NIXL_PULL_WORKER


def _differs(worker: Any, req_id: str, meta: Any) -> bool:
    """True if prefill has another number of blocks than decode needs."""
    remote, hits = meta.remote.block_ids, meta.local_num_computed_blocks
    if not any(meta.local_block_ids) or len(remote) != len(meta.local_block_ids):
        return False
    if not all(isinstance(group, (list, tuple)) for group in remote):  # malformed: KVF311
        return False
    if meta.remote.engine_id not in worker._remote_agents:
        return False
    return any(len(remote[at]) != hits[at] + len(meta.local_block_ids[at]) for at in _groups(worker, meta))


@fix_around(when=_differs, on_fault=_nixl.fail_load)
def pair_from_start(worker: Any, req_id: str, meta: Any) -> Steps:
    if not _same_blocks(worker, meta.remote.engine_id):
        return (yield)
    hits, own, remote = meta.local_num_computed_blocks, meta.local_block_ids, list(meta.remote.block_ids)
    for number in _groups(worker, meta):
        wanted = hits[number] + len(own[number])
        if len(remote[number]) < wanted:
            return _nixl.fail_load(worker, req_id)
        remote[number] = list(remote[number][:wanted])
    note(__name__, f"request {req_id}: blocks after its prompt are not read")
    meta.remote.block_ids = remote
    return (yield)


def _groups(worker: Any, meta: Any) -> list[int]:
    """The KV groups of full attention, by number."""
    groups = enumerate(zip(worker._group_spec_types, meta.local_block_ids, strict=True))
    return [number for number, (spec, blocks) in groups if blocks and _nixl.has_full_attention(spec)]


def _same_blocks(worker: Any, engine: str) -> bool:
    """True if a block has the same tokens in both engines, and one worker has all of these tokens."""
    remote = worker.transfer_topo.get_engine_info(engine)
    ours = worker.block_size, worker._physical_blocks_per_logical_kv_block, worker.dcp_size
    theirs = remote.remote_block_size, remote.remote_physical_blocks_per_logical, remote.remote_dcp_size
    return bool(ours == theirs and ours[2] == 1)


def shows_bug(hook: Any, module: Any) -> bool:
    """Two blocks wanted of three. Wrong is to read the last two."""
    read: list[Any] = []

    def reads(read_spec: Any, **_: Any) -> bool:
        read.append(read_spec.remote_block_ids)
        return True

    class FullAttentionSpec:
        pass

    engine = SimpleNamespace(
        remote_block_size=16, remote_physical_blocks_per_logical=1, remote_dcp_size=1, remote_tp_size=1
    )
    topo = SimpleNamespace(get_engine_info=lambda _: engine, tp_ratio=lambda _: 1, block_size_ratio=lambda _: 1)
    plan = SimpleNamespace(all_source_ranks=(0,), source_ranks_per_group=((0,),), local_consumers=1)
    worker = _nixl.worker_side(
        transfer_topo=topo, tp_mappings={"p": plan}, _remote_agents={"p": {(0, 0): "a"}}, _mixed_mem_types=False,
        dst_region_group_ids={"p": [0]}, region_group_ids=[0], _group_spec_types=(FullAttentionSpec,),
        src_xfer_handles_by_block_size={16: 1}, dst_xfer_side_handles={"p": {0: 2}}, _read_blocks=reads,
    )  # fmt: skip
    hook(worker, stubs.NAME, _nixl.load([7, 8, 9], [1, 2]))
    return bool(read != [[[7, 8]]])


FIX = Fix(
    __name__,
    __doc__,
    effect="wrong output",
    targets=(NIXL_PULL_WORKER._read_blocks_for_req(broken=">=0.32", probe=shows_bug, fix=pair_from_start),),
    evidence={"KVR011": r"^start_load_kv: AssertionError"},
    scenarios=("nixl-prefill-generates-more", "nixl-prefill-has-fewer-blocks"),
    no_patch=PRIVATE,
    on_fault="closed",
)
