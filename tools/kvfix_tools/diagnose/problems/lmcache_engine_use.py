"""LMCache's engine used in a state or a place for which it is not made: no storage yet, another device, odd keys."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_ADAPTER = "lmcache/integration/vllm/vllm_v1_adapter.py"
_STORAGE = "lmcache/v1/storage_backend/storage_manager.py"
_REPORT = "report it with `kvfix-diagnose LOG --issue FILE.md`: no release up to 0.5.6 is right"

PROBLEMS = (
    Problem(
        code="KVD129",
        name="engine-used-before-its-storage",
        severity=Severity.CRASH,
        title="LMCache's engine is used before its storage was made.",
        shows=(
            Failed(
                kind="AssertionError",
                within="lmcache/",
                source="assert self.storage_manager is not None",
            ),
            Failed(
                kind="AssertionError",
                text="Async serializer must be initialized via post_init before using async_lookup_and_prefetch.",
            ),
            Failed(kind="AssertionError", within="start_load_kv", source="assert len(self.kv_caches) > 0", at=_ADAPTER),
            Failed(kind="AssertionError", within="wait_for_save", source="assert len(self.kv_caches) > 0", at=_ADAPTER),
            Failed(kind="AssertionError", within="save_kv_layer", source="assert len(self.kv_caches) > 0", at=_ADAPTER),
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="The storage is made when vLLM calls register_kv_caches (LMCache's line `Registering KV caches`), with "
        "all layers of this rank. No such line in this process: its vLLM or plugin does not call it, or the rank has "
        "no attention layer (pipeline parallelism). With it: an error between that line and this one ended the making.",
        now="look for `Registering KV caches` and the first error after it in the same process; the releases of the "
        "pair as `kvfix doctor -- vllm serve ...` names them",
        good="a pair of releases that kvfix doctor finds right",
    ),
    Problem(
        code="KVD448",
        name="allocation-on-the-scheduler-side",
        severity=Severity.CRASH,
        title="LMCache is asked for memory in the scheduler's process, where it has none.",
        shows=(
            Failed(kind="RuntimeError", text="Allocator backend not available for scheduler role", at=_STORAGE),
            Failed(kind="RuntimeError", text="Batched put not available for scheduler role", at=_STORAGE),
            Failed(kind="RuntimeError", text="SafeLocalCPUBackend.allocate() should never be called."),
            Failed(
                kind="AssertionError",
                text="local_cpu_backend is required for get_allocator_backend, should not be called in scheduler role",
            ),
        ),
        connectors=_IN_PROCESS,
        releases={"lmcache": ">=0.3.9.post1"},
        cause="enable_scheduler_bypass_lookup (or a connector that looks up in the scheduler) makes an engine without "
        "a buffer there, for lookups only. A backend that loads in order to answer (audit, a plugin of your own) "
        "allocates, and is not made for it.",
        now="enable_scheduler_bypass_lookup: false in LMCache's configuration; restart",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD458",
        name="kv-cache-on-another-device",
        severity=Severity.CRASH,
        title="LMCache's engine stands on another GPU than the rank's KV cache.",
        shows=(
            Failed(
                kind="AssertionError",
                within="lmcache/",
                source="assert self.kvcaches[0].device == self.device",
            ),
            Failed(
                kind="AssertionError",
                within="lmcache/",
                source="assert self.gpu_buffer.device ==",
            ),
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="LMCache takes the GPU of its worker number modulo the GPUs that it sees; vLLM takes its local rank. "
        "They differ where ranks of one engine see different CUDA_VISIBLE_DEVICES (Ray, one GPU for each container), "
        "or with data parallelism inside one node.",
        now="the same CUDA_VISIBLE_DEVICES for all ranks of a node, in the order of the ranks; one engine for each "
        "container where data parallelism is meant; restart",
        good="ranks of a node that all see the same devices",
    ),
    Problem(
        code="KVD459",
        name="all-tokens-masked",
        severity=Severity.CRASH,
        title="LMCache is asked to skip as many tokens as the request has.",
        shows=(
            Failed(
                kind="AssertionError",
                text="The number of Falses in the mask shouldn't be less than the length of tokens.",
                at="lmcache/v1/token_database.py",
            ),
        ),
        connectors=_IN_PROCESS,
        cause="Blending splits a prompt at blend_special_str and leaves out the tokens that vLLM has already "
        "(skip_leading_tokens). Here those are all of them: a prompt that is wholly in vLLM's own prefix cache.",
        now="--no-enable-prefix-caching with enable_blending, as LMCache's own examples have it; restart",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD1001",
        name="layerwise-load-from-a-peer",
        severity=Severity.CRASH,
        title="use_layerwise asks a peer for chunks that no lookup has announced.",
        shows=(
            Failed(
                kind="KeyError",
                text="fake_lookup_id",
                within="batched_get_non_blocking",
                source="self.lookup_id_to_peer_mapping.pop(lookup_id)",
            ),
        ),
        connectors=_IN_PROCESS,
        cause="A load by layers hands every backend the same word in place of a lookup's id, and P2PBackend finds the "
        "peer by that id. The two settings cannot be used together.",
        now="use_layerwise: false with enable_p2p: true; restart",
        good="keep it so: up to 0.5.6 no release can do both",
    ),
    Problem(
        code="KVD1002",
        name="event-popped-twice-or-early",
        severity=Severity.CRASH,
        title="A request's asynchronous load is taken twice, or before it is done.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Event <request> of type <kind> not found in EventManager.",
                at="lmcache/v1/event_manager.py",
            ),
            Failed(
                kind="AssertionError",
                text="Event <request> of type <kind> is not done.",
                at="lmcache/v1/event_manager.py",
            ),
        ),
        sentence="request {request}",
        releases={"lmcache": "==0.3.9"},
        cause="enable_async_loading keeps one event for each request. A request that is preempted and asked for "
        "again, or aborted, takes its event a second time; one that is scheduled before its load has ended takes it "
        "early.",
        now="enable_async_loading: false (LMCACHE_ENABLE_ASYNC_LOADING=false); restart",
        good="no release is known to be right (0.5.6 asserts it too): leave enable_async_loading at false",
        sure=False,
    ),
    Problem(
        code="KVD1003",
        name="preempted-request-forgotten",
        severity=Severity.CRASH,
        title="A preempted request comes back, and LMCache's scheduler side no longer holds it.",
        shows=(
            Failed(kind="AssertionError", text="Preempted request <request> not found in _unfinished_requests"),
            Failed(
                kind="KeyError",
                within="vllm_v1_adapter.py:build_connector_meta",
                source="request_tracker = self._request_trackers[req",
            ),
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="LMCache forgets a request when vLLM says that it finished. One that goes on after that was given the "
        "id of one that had ended: a client (or a router that retries) that sends the same request id while the first "
        "is still running.",
        now="a request id of its own for each request: no X-Request-Id that repeats, a router that makes a new one "
        "for a retry; restart",
        good="ids that are unique",
    ),
    Problem(
        code="KVD1004",
        name="pushed-chunk-is-gone",
        severity=Severity.CRASH,
        title="Decode's PD buffer does not hold a chunk that prefill had pushed.",
        shows=(Failed(kind="AssertionError", text="Key <key> not found in local data.", within="get_blocking"),),
        connectors=_IN_PROCESS,
        sure=False,
        cause="With pd_role: receiver a chunk is in the buffer from its announcement to its first load, which takes "
        "it out. Two requests with the same prefix share the chunk's key: the first one's load, abort or pd_buffer "
        "timeout takes it from the second.",
        now="a router that does not send two requests with one prefix to a decode instance at the same time; restart "
        "decode",
        good=_REPORT,
    ),
    Problem(
        code="KVD1006",
        name="lookup-socket-broken",
        severity=Severity.SLOW,
        title="LMCache's lookup cannot speak to a worker any more, and answers 0 hits from then on.",
        shows=(Logged("ZMQ error for rank <rank>: <error>", "lmcache/v1/lookup_client/lmcache_lookup_client.py"),),
        sentence="rank {rank}: {error}",
        releases={"lmcache": "<0.3.10"},
        cause="The socket asks and answers in turn. After an answer that never came (a worker that died or was busy "
        "longer than the timeout) it may not send again: `Operation cannot be accomplished in current state`.",
        now="restart the engine; LMCACHE_LOOKUP_TIMEOUT_MS=10000 where workers are only busy",
        fixed={"lmcache": "0.3.10"},
        sure=False,
    ),
    Problem(
        code="KVD1007",
        name="bytes-of-chunk-do-not-divide",
        severity=Severity.CRASH,
        title="A chunk's bytes are no whole number for each token.",
        shows=(
            Failed(
                kind="AssertionError",
                within="base_connector.py",
                source="assert self.full_chunk_size_bytes % metadata.chunk_size == 0",
                at="lmcache/v1/storage_backend/connector/base_connector.py",
            ),
            Failed(
                kind="AssertionError",
                within="lmcache/",
                source="assert self.full_chunk_size_bytes % metadata.chunk_size == 0",
            ),
        ),
        releases={"lmcache": ">=0.3.15"},
        connectors=_IN_PROCESS,
        cause="A model whose layers hold KV of several shapes (MLA with an indexer, hybrid groups, packed fp8) has "
        "chunks whose bytes are not tokens times one size; remote connectors count so.",
        now="remote_url: null (LMCache's CPU cache alone) for this model; or chunk_size: a multiple of the largest "
        "block of its groups",
        good=_REPORT,
        sure=False,
    ),
    Problem(
        code="KVD1008",
        name="buffers-left-in-blending",
        severity=Severity.CRASH,
        title="A load by layers ended while layers of it were still in the blending buffer.",
        shows=(
            Failed(
                kind="AssertionError",
                text="There are still layers in the buffer mapping after releasing the GPU buffers.",
            ),
        ),
        connectors=_IN_PROCESS,
        sure=False,
        cause="Blending keeps each layer that it has loaded until the layer was computed. The model has fewer layers "
        "that call LMCache than num_layers (a draft model's layers, layers without attention), so some are never "
        "taken.",
        now="enable_blending: false; without --speculative-config to see whether the draft layers are it",
        good=_REPORT,
    ),
)
