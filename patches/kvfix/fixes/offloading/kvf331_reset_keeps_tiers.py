"""Wrong text after a weight update: OffloadingConnector loads KV of the old weights from its secondary tiers.

Symptom: Nothing is logged. After `reset_prefix_cache` with `reset_connector` (a weight update in RLHF), prompts that
were offloaded before return wrong text. The bug needs `TieringOffloadingSpec` with `secondary_tiers`.

Cause: The connector's `reset_cache` empties the CPU memory, returns True, and keeps the secondary tiers
(`TieringOffloadingManager.reset_cache`, tiering/manager.py 0.32.0:944: "persistent stores (FS, network) keep their
data across resets"). The keys of these tiers depend on the tokens only, not on the weights.

Fix: `reset_cache` answers False and logs the reason. `reset_prefix_cache` then answers False too, so the caller learns
that old KV is still stored. kvfix deletes no files. Delete the files in `root_dir`, or use another `root_dir`.
- Remove when: `OffloadingConnector.reset_cache` answers False, or the keys of a tier change with the weights.
"""

from kvfix.fixes import _closed
from kvfix.fixes.api import OFFLOADING_CONNECTOR, Any, Fix, engine_log, fix_after, stubs


@fix_after(
    when=lambda connector, *_, **__: getattr(connector.connector_scheduler.manager, "secondary_tiers", None),
    on_fault=_closed.refuse,
)
def reset_cache(connector: Any, answer: Any) -> bool:
    engine_log.warning(
        "KVF331: reset_prefix_cache returns False, because the secondary tiers of OffloadingConnector keep KV of the "
        "old weights. Delete their files, or use another root_dir."
    )
    return False


def shows_bug(hook: Any, module: Any) -> bool:
    """Reset a manager that has a secondary tier. With the bug, the answer is True."""
    scheduler = stubs.Stub(manager=stubs.Stub(secondary_tiers=[object()]), reset_cache=lambda: None)
    return hook(stubs.Stub(connector_scheduler=scheduler)) is True


FIX = Fix(
    OFFLOADING_CONNECTOR.reset_cache(broken=">=0.26.0", probe=shows_bug, fix=reset_cache),
    effect="wrong output",
    scenarios=("offload-reset-keeps-files",),
    no_patch={"vllm": "vLLM keeps a tier's data on purpose, so vLLM must decide what reset_cache should answer"},
)
