"""An idle engine never rests: with `lazy_offload` SimpleCPUOffloadConnector stores the same blocks again and again.

Symptom: Nothing is logged. When the KV of past prompts needs more memory than `cpu_bytes_to_use`, an idle EngineCore
uses a whole CPU core, and the GPU copies blocks. `vllm:simple_kv_offload_pending_store_blocks` never reaches 0.

Cause: In each step `lazy_offload` stores cached blocks from the GPU's free list, if the CPU memory lacks the blocks
(manager.py 0.32.0:586-640). A stored block goes to the end of the free list. If the free list has more blocks than
the CPU memory, the block leaves the CPU memory before `lazy_offload` reaches it again. So the store repeats.
While a store is in flight, EngineCore runs more steps (`has_pending_push_work`). Each step starts another store.

Fix: After the last step that computes something, the fix stores only as many blocks as fit into the CPU memory.
- Remove when: `_prepare_lazy_store_specs` stores a block only once after each use of the block.
"""

from kvfix.fixes.api import SIMPLE_SCHEDULER, Any, Fix, Steps, fix_around

#: Attribute of the scheduler: number of blocks stored since the last step that computed something.
_STORED = "_kvfix_stored_at_rest"


@fix_around(when=lambda scheduler, *_, **__: scheduler._lazy_mode)
def prepare_store_specs(scheduler: Any, output: Any) -> Steps:
    stored = getattr(scheduler, _STORED, 0)
    if output.total_num_scheduled_tokens:
        setattr(scheduler, _STORED, 0)
        return (yield)
    if stored >= scheduler.num_cpu_blocks - 1:  # one CPU block is the null block
        return [], [], [], None
    answer = yield
    setattr(scheduler, _STORED, stored + len(answer[0]))


FIX = Fix(
    SIMPLE_SCHEDULER.prepare_store_specs(broken=">=0.32", fix=prepare_store_specs),
    effect="hang",
    scenarios=("simple-offload-never-rests",),
    no_patch={"vllm": "vLLM must decide what lazy_offload stores while no request runs"},
)
