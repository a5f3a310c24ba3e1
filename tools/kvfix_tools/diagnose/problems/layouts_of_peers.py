"""Two engines, or an engine and a tier, that describe their KV differently; memory that cannot be registered."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1/"
_NIXL = ("NixlConnector", "NixlPushConnector", "MultiConnector")

PROBLEMS = (
    Problem(
        code="KVD284",
        name="nixl-groups-differ",
        severity=Severity.CRASH,
        title="Prefill and decode have other KV groups, regions or block counts for the same request (NIXL).",
        shows=(
            Failed(kind="AssertionError", text="push group-count mismatch for", at=_V1 + "nixl/push_worker.py"),
            Failed(kind="AssertionError", text="push block-count mismatch for", at=_V1 + "nixl/push_worker.py"),
            Failed(text="Number of KV cache groups must match", at=_V1 + "nixl/base_scheduler.py"),
            Failed(text="Remote region metadata lengths disagree", at=_V1 + "nixl/base_worker.py"),
            Failed(text="Remote advertised no region_members", at=_V1 + "nixl/base_worker.py"),
            Failed(text="in multiple regions", at=_V1 + "nixl/base_worker.py"),
        ),
        releases={"vllm": ">=0.32"},
        connectors=_NIXL,
        cause="The two engines group their layers differently: another release, --disable-hybrid-kv-cache-manager, "
        "speculative decoding, --block-size or --kv-cache-dtype on one side only.",
        now="the same image and the same of these options on prefill and decode; then restart both",
        good="one configuration for both roles, with only kv_role and ports apart",
        sure=False,
    ),
    Problem(
        code="KVD285",
        name="p2p-tiers-differ",
        severity=Severity.SLOW,
        title="Two engines that share their CPU tiers refuse one another: they do not describe blocks alike.",
        shows=tuple(
            sign
            for what in ("block_len mismatch from", "config fingerprint mismatch from", "hash seed mismatch from")
            for sign in (Failed(text=what), Logged(f"{what} <peer>"))
        ),
        releases={"vllm": ">=0.26"},
        cause="Block length, configuration and PYTHONHASHSEED have to be the same on all peers; the message names the "
        "two values (session.py 0.32.0:482).",
        now="PYTHONHASHSEED=0 for every engine, the same model, --block-size, --kv-cache-dtype and parallel sizes",
        good="one configuration for all peers",
    ),
    Problem(
        code="KVD286",
        name="tier-file-cut",
        severity=Severity.SLOW,
        title="A file of a tier on disk is shorter than a block.",
        shows=(
            Failed(text="Short read: expected <due> bytes, read <got>"),
            Failed(text="Short write: expected <due> bytes, wrote <got>"),
            Logged("Short read: expected <due> bytes, read <got>"),
            Logged("Short write: expected <due> bytes, wrote <got>"),
        ),
        sentence="{got} of {due} bytes",
        cause="The disk is full, a quota was reached, or the writer of the file ended in the middle of it.",
        now="df -h and df -i on the tier's folder; empty it while no engine runs",
        good="a folder with room for the tier's size, for one configuration each",
    ),
    Problem(
        code="KVD287",
        name="mooncake-refuses-kv-memory",
        severity=Severity.CRASH,
        title="Mooncake could not register the memory of the KV cache.",
        shows=(Failed(text="Mooncake register_buffer failed for addr <addr> len <bytes> (<kind>): <code>"),),
        sentence="{bytes} bytes of {kind} memory, error {code}",
        cause="With RDMA: no nvidia_peermem (device memory), memlock too low (host memory), or more memory than the "
        "card may map. With `cumem` (sleep mode) memory that cannot be exported.",
        now="lsmod | grep nvidia_peermem, ulimit -l unlimited, without --enable-sleep-mode; protocol tcp once, to see "
        "that it is RDMA",
        good="nvidia_peermem at boot, and memlock unlimited in the container",
        sure=False,
    ),
    Problem(
        code="KVD288",
        name="mooncake-layout-not-supported",
        severity=Severity.CRASH,
        title="Mooncake cannot describe the KV cache of this model.",
        shows=(
            Failed(text="Missing transferable KV caches for layers", at=_V1 + "mooncake/store/worker.py"),
            Failed(text="which is not divisible by its <blocks> blocks", at=_V1 + "mooncake/store/worker.py"),
            Failed(text="expose inconsistent region sizes", at=_V1 + "mooncake/store/worker.py"),
            Failed(text="TP-shared Mooncake store requires"),
            Failed(text="MooncakeStoreScheduler requires mamba_cache_mode='align'"),
            Failed(
                text="Mooncake transfer length exceeds physical block stride", at=_V1 + "mooncake/mooncake_connector.py"
            ),
        ),
        releases={"vllm": ">=0.32"},
        cause="Layers that share memory, have other page sizes, or keep states (Mamba) do not fit into its regions; "
        "the message names the layer and the rule.",
        now="what the message names (--mamba-cache-mode align, --disable-hybrid-kv-cache-manager); else the model "
        "without this connector",
        good="a release of vLLM that supports the model's layout with it",
        sure=False,
    ),
    Problem(
        code="KVD289",
        name="moriio-layout-not-supported",
        severity=Severity.CRASH,
        title="MoRIIO cannot describe the KV cache of this model, or the two engines describe it differently.",
        shows=(
            *(
                Failed(text=f"MoRIIO KV cache {what} mismatch for layer")
                for what in ("block length", "block size", "num_blocks")
            ),
            Failed(text="the two sides must run the same model and KV cache layout"),
            Failed(text="MoRIIO hybrid"),
        ),
        releases={"vllm": ">=0.32"},
        cause="All layers need one block length, size and count, on both sides; hybrid models only in READ mode, with "
        "one group of attention. The message names what differs.",
        now="the same model, --block-size and --kv-cache-dtype on both sides; read_mode true in "
        "kv_connector_extra_config for a hybrid model",
        good="one configuration on both sides",
    ),
    Problem(
        code="KVD290",
        name="nixl-load-without-blocks",
        severity=Severity.CRASH,
        title="A request asked NixlConnector for a remote prefill that names no blocks, and EngineCore dies.",
        shows=tuple(
            Failed(
                kind="AssertionError",
                source="assert num_external_tokens == 0",
                within=f"{file}:update_state_after_alloc",
            )
            for file in ("nixl_connector.py", "nixl/scheduler.py", "nixl/pull_scheduler.py")
        ),
        sentence="its kv_transfer_params have no remote_block_ids",
        cause="The prefill engine kept no blocks for it, or the request did not come from the router. The connector "
        "had promised the whole prompt before it looked (pull_scheduler.py 0.32.0:60, :186). One such request ends the "
        "engine.",
        now="kvfix run -- CMD; and let only the router reach the engine's port",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF301)",
    ),
    Problem(
        code="KVD291",
        name="mooncake-request-of-the-other-role",
        severity=Severity.CRASH,
        title="MooncakeConnector got a request for the other role, and EngineCore dies.",
        shows=tuple(
            Failed(kind="AssertionError", source=source, within=f"mooncake_connector.py:{hook}")
            for source in ("assert not self.is_kv_producer", "assert not self.is_kv_consumer", "assert self.kv_role !=")
            for hook in ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
        ),
        cause="The request's kv_transfer_params ask a producer to load or a consumer to send: the router has taken "
        "one engine for the other, or it did not come from the router (mooncake_connector.py 0.32.0:1022, :1076).",
        now="kvfix run -- CMD; the addresses of prefill and decode in the router; kv_role kv_both where one engine "
        "does both",
        good="no release of vLLM up to 0.33.0 is right: keep kvfix (KVF302)",
    ),
)
