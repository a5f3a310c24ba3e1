"""Hits return wrong text with sliding windows or Mamba states: vLLM frees a block while the server still copies it.

Symptom: No error is logged. Under load, prompts that hit the cache return wrong text, until the chunks are evicted. The
model has full attention, and sliding windows (Gemma, gpt-oss) or recurrent states (Mamba, GDN: Qwen3-Next, Nemotron-H).

Cause: The server copies the blocks of a store after the step, and the engine does not wait for the copy. In the next
step the window begins at a later token. vLLM frees the blocks before the window at once (`remove_skipped_blocks`,
v1/core/single_type_kv_cache_manager.py 0.32.0:672), and may give these blocks to another request in the same step. For
layers with states, vLLM keeps only the state of the last step and frees the earlier states.

At the end of a request, vLLM also frees the blocks before the window at once (scheduler.py 0.32.0:3025). vLLM frees the
other blocks of the request only when the stores have ended. LMCache waits for its stores only after a preemption
(`need_flush_before_forward`, lmcache_mp_connector.py 0.5.6:1478).

Fix: The fix records the blocks of windows and states in each store, and the blocks that vLLM has freed since. If a
step uses a freed block, the fix sets the flag that LMCache sets after a preemption. Before the step, each worker then
waits for stores in flight, at most `mq_timeout` for each store. On CUDA, LMCache up to 0.5.5 waits only with KVF106.
- Releases: LMCache 0.4.7 to 0.5.6. Earlier releases were not tested with several KV groups.
- Remove when: vLLM or LMCache keeps a block until the block is stored.
"""

from dataclasses import dataclass, field

from kvfix.fixes import _closed, _windows
from kvfix.fixes.api import LMCACHE_MP, Any, Fix, fix_after, note, stubs

#: If vLLM has freed more than _MOST blocks, the step waits for the stores in flight without a check of each block.
_MOST = 1024


@dataclass
class Stored:
    """The blocks of one window in a store that may be in flight."""

    window: tuple[int, int]
    request: str
    first: int  # the token at which the first block begins
    blocks: list[int]
    computed: int  # computed tokens after the request's last step, for `leave` when the request ends

    def leave(self, computed: int) -> list[int]:
        """Remove and return the blocks that vLLM frees when the request has this number of computed tokens."""
        size = self.window[1]
        out = max(0, _windows.kept_from(computed, *self.window) - self.first) // size
        left, self.blocks = self.blocks[:out], self.blocks[out:]
        self.first += out * size
        return [block for block in left if block]  # null block 0 belongs to no request


@dataclass
class Stores:
    """The blocks in stores that may be in flight. held: blocks that vLLM has not freed. freed: ids of freed blocks."""

    held: list[Stored] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)

    def step(self, computed: dict[str, int], scheduled: dict[str, int], open_requests: Any) -> None:
        """Record the blocks that vLLM frees when a step begins. computed, scheduled: tokens of each request."""
        for stored in self.held:
            if stored.request in computed:
                self.freed.update(stored.leave(computed[stored.request]))
                stored.computed = computed[stored.request] + scheduled[stored.request]
            elif stored.request not in open_requests:
                self.freed.update(stored.leave(stored.computed))
        self.held = [stored for stored in self.held if stored.blocks and stored.request in open_requests]


def _wait_and_drop(connector: Any, answer: Any, scheduler_output: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    metadata.need_flush_before_forward = metadata._kvfix_preempted = True
    vars(connector).pop("_kvfix_stores", None)
    return _closed.drop_stores(connector, answer, scheduler_output, metadata)


@fix_after(when=lambda connector, *_, **__: _windows.has_several_groups(connector), on_fault=_wait_and_drop)
def fix(connector: Any, answer: Any, scheduler_output: Any, metadata: Any) -> None:
    stores = vars(connector).setdefault("_kvfix_stores", Stores())
    computed, scheduled = _windows.computed(scheduler_output), scheduler_output.num_scheduled_tokens
    stores.step(computed, scheduled, connector.request_trackers)
    if stores.freed:
        pool = getattr(connector, "_gpu_block_pool", None) or connector._kv_cache_manager.block_pool
        if len(stores.freed) > _MOST or any(pool.blocks[block].ref_cnt for block in stores.freed):
            # LMCache 0.5.2 and later reads `need_flush_before_forward`. KVF106 reads `_kvfix_preempted`.
            note(__name__, "workers wait for stores in flight: vLLM has freed their blocks")
            metadata.need_flush_before_forward = metadata._kvfix_preempted = True
    if getattr(metadata, "need_flush_before_forward", False):
        stores.held, stores.freed = [], set()
    states = {group: (_windows.STATE, size) for group, size in _windows.states(connector).items()}
    windows = {**_windows.of(connector), **states}
    for meta in metadata.requests:
        if meta.direction == "STORE":
            done = computed[meta.request_id] + scheduled[meta.request_id]
            for group, window in windows.items():
                stores.held.append(Stored(window, meta.request_id, meta.op.start, list(meta.op.block_ids[group]), done))


def shows_bug(hook: Any, module: Any) -> bool:
    """Store 256 tokens with a window of 16, and use the blocks in the next step. With the bug, no worker waits."""
    connector = _windows.scheduler_side(module, 16, list(range(1, 65)), list(range(65, 129)), computed=0)
    connector._gpu_block_pool = stubs.Stub(blocks=[stubs.Stub(ref_cnt=1)] * 129)
    _windows.stored(hook, module, connector, 0, 256, blocks=[])
    metadata = _windows.stored(hook, module, connector, 256, 256, blocks=[])[0]
    return not getattr(metadata, "need_flush_before_forward", False)


FIX = Fix(
    LMCACHE_MP._process_cached_requests(broken=">=0.4.7,<=0.5.6", probe=shows_bug, fix=fix, order=2),
    effect="wrong output",
    evidence={"KVR014": r"used again"},
    scenarios=("mp-window-freed-while-stored", "mp-window-freed-at-end", "mp-state-freed-while-stored"),
    no_patch={"lmcache": "vLLM and LMCache must decide which of the two keeps a block until the block is stored"},
)
