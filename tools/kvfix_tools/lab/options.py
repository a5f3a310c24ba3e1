"""The options of a lab engine: all settings that change how vLLM and a connector count tokens."""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class Known(NamedTuple):
    name: str  # name of the class that vLLM loads
    side: str  # the lab's class for both roles of the connector, as module:class
    needs: dict[str, tuple[str, str]]  # {distribution: (releases that the lab plays, why no other release)}
    module: str | None = None  # module of the class, if vLLM has another class with the same name


_SINCE_0_32 = {"vllm": (">=0.32", "earlier releases of vLLM were not tried")}
_WITH_LMCACHE = {**_SINCE_0_32, "lmcache": (">=0.5.6", "earlier releases of LMCache were not tried")}
KNOWN = {
    "v1": Known(
        "LMCacheConnectorV1",
        "v1:V1",
        {
            "lmcache": (">=0.3.9", "earlier releases of LMCache cannot be imported with vLLM 0.11 and later"),
            "vllm": (">=0.11.2", "earlier releases of vLLM were not tried"),
        },
    ),
    "mp": Known(
        "LMCacheMPConnector",
        "mp:MP",
        {
            "lmcache": (">=0.4.5", "earlier releases of LMCache lack a class that vLLM loads as LMCacheMPConnector"),
            "vllm": (">=0.22.0", "LMCache's connector imports names that earlier releases of vLLM do not have"),
        },
        "lmcache.integration.vllm.lmcache_mp_connector",
    ),
    "mp-in-tree": Known(
        "LMCacheMPConnectorUpstream",
        "mp:MP",
        {
            "lmcache": (
                ">=0.4.4,<0.4.7",
                "vLLM's copy cannot be imported with earlier LMCache. With later LMCache the engine ends at its start "
                "with a TypeError. The copy calls ParallelStrategy with seven arguments (vllm lmcache_mp_connector.py "
                "0.32.0, 0.33.0:120) where 0.4.7 takes five (lmcache vllm_multi_process_adapter.py 0.4.7:284). It "
                "calls the adapter with a server_url (:131) where 0.5.0 to 0.5.6 take server_urls (0.5.6:673)",
            ),
            "vllm": (">=0.22.0", "in 0.20.2 and earlier, the copy has another name, LMCacheMPConnector"),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
    ),
    "offloading": Known("OffloadingConnector", "offloading:Alone", _SINCE_0_32),
    "simple-offload": Known("SimpleCPUOffloadConnector", "offloading:Alone", _SINCE_0_32),
    "nixl-pull": Known("NixlConnector", "nixl:NixlSide", _SINCE_0_32),
    "nixl-push": Known("NixlPushConnector", "nixl:PushSide", _SINCE_0_32),
    "nixl-multi": Known("NixlConnector", "pair_multi:NixlAndLMCache", _WITH_LMCACHE),
    "nixl-push-multi": Known("NixlPushConnector", "pair_multi:PushAndLMCache", _WITH_LMCACHE),
    "nixl-offload": Known("NixlConnector", "pair_multi:NixlAndOffloading", _SINCE_0_32),
    "mooncake": Known("MooncakeConnector", "mooncake:MooncakeSide", _SINCE_0_32),
    "mooncake-multi": Known("MooncakeConnector", "pair_multi:MooncakeAndLMCache", _WITH_LMCACHE),
}
CONNECTORS = tuple(KNOWN)
#: Connectors that join a prefill and a decode engine.
PAIRS = tuple(each for each in CONNECTORS if each.startswith(("nixl", "mooncake")))
#: Connectors of PAIRS that can have several ranks. The two engines can have different numbers of ranks.
WITH_RANKS = ("nixl-pull", "nixl-push")
BY_NIXL = tuple(each for each in PAIRS if each.startswith("nixl"))
#: Connectors with which two engines can share a cache (pair.py).
SHARED = ("v1", "mp")
#: vLLM's own connectors that offload KV to CPU memory.
OF_VLLM = ("offloading", "simple-offload")
#: Chunk size of the real server, in tokens.
SERVER_CHUNK = 16


@dataclass(frozen=True)
class Options:
    """The options of one engine. Sizes are in tokens. lmcache: {name of a setting of LMCache: its value}."""

    #: A key of KNOWN: v1 (LMCache in process), mp (LMCache's multi-process connector), mp-in-tree (vLLM's copy of mp),
    #: and so on. For any other connector: its name in vLLM, or my_package.connector:MyConnector (any_connector.py).
    connector: str = "v1"
    #: For connectors outside KNOWN. config: `kv_connector_extra_config`. lose: module:function that drops stored KV.
    config: dict[str, Any] = field(default_factory=dict)
    lose: str = ""
    #: Number of layers of each KV group. Only a connector outside KNOWN can have more than one layer.
    layers: int = 1
    #: Play the connector in a MultiConnector, next to another connector that vLLM asks first (connector.py).
    beside: bool = False
    #: Play OffloadingConnector (offloading.py) in a MultiConnector, as "first" or "last" child. "": do not play it.
    offloading: str = ""
    #: Use SimpleCPUOffloadConnector (simple_offload.py) instead of OffloadingConnector. v1 only.
    simple_offloading: bool = False
    #: Number of steps of a lookup, load or store of mp's server. OffloadingConnector's transfers take 2 * delay steps.
    delay: int = 1
    #: Number of workers. By default, workers are ranks of tensor parallelism. A MultiConnector has one worker.
    ranks: int = 1
    #: True if workers are ranks of pipeline parallelism. Then vLLM schedules a step while workers run earlier steps.
    pipeline: bool = False
    #: True if workers are ranks of decode context parallelism (DCP). Each rank has the KV of a part of the tokens. All
    #: ranks together have `block_size` tokens in a block. mp only, because LMCache's in-process connector does not
    #: support DCP (vllm_v1_adapter.py 0.5.6:396, 815, 1159).
    context: bool = False
    #: How many more steps a transfer takes in the second rank than in the first rank. No effect with v1.
    rank_delay: int = 0
    #: Use a real `lmcache server` (mp_real.py), for one rank with one KV group. mp only, without MultiConnector.
    real_server: bool = False
    block_size: int = 16
    num_blocks: int = 64
    chunk_size: int = 64
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 8
    max_model_len: int = 2048
    prefix_caching: bool = True
    #: Admit a request only if blocks for all its tokens are free, as vLLM does by default. False: only if blocks for
    #: the tokens of its first step are free, as old releases do.
    reserve_full_isl: bool = True
    #: Order of requests: fcfs, or priority.
    policy: str = "fcfs"
    #: Sizes of sliding windows, in tokens. Each window adds a KV group, so the connector must have SupportsHMA.
    windows: tuple[int, ...] = ()
    #: A block in the KV group of a window has this many times the tokens of a full-attention block.
    window_blocks: int = 1
    #: Add a KV group with recurrent states, as for Mamba layers in mode "align". mp only.
    states: bool = False
    #: True if the server stores the KV groups of a chunk under separate keys (`--separate-object-groups`).
    separate_object_groups: bool = False
    #: Schedule a step before the previous step has ended, as vLLM does by default on a GPU.
    async_scheduling: bool = False
    #: Use vLLM's model runner V2, the default for most models on a GPU. V2 gets resumed requests as new requests.
    model_runner_v2: bool = False
    #: True if vLLM reads a worker's report before it calls `wait_for_save`, as vLLM does with a drafter.
    save_last: bool = False
    #: The drafter of speculative decoding: ngram, eagle, mtp (with one module for each draft), or "" for none. Without
    #: asynchronous scheduling, ngram does not always propose all drafts.
    drafter: str = ""
    #: Number of drafts per step.
    drafts: int = 0
    #: Percentage of drafts that are equal to the token that the model samples.
    acceptance: int = 0
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    lmcache: dict[str, Any] = field(default_factory=dict)
    #: Play two engines that share a cache (pair.py). v1 and mp only.
    neighbours: bool = False
    #: Number of blocks of the decode engine (pair.py). 0: as many as the prefill engine has.
    decode_blocks: int = 0
    #: peer_ranks: ranks of a pair's other engine (0: as `ranks`). kv_heads: number of KV heads. Ranks may share a head.
    peer_ranks: int = 0
    kv_heads: int = 1
    #: multi: engines of a pair that have LMCache's in-process connector too. lmcache_first: vLLM asks LMCache first.
    multi: tuple[str, ...] = ()
    lmcache_first: bool = False
    #: Use real NIXL (nixl_real.py) instead of the lab's simulation of NIXL. BY_NIXL only.
    real_transfers: bool = False
    #: `kv_connector_extra_config` of a connector in OF_VLLM or PAIRS, or of the offloading connector next to v1.
    extra: dict[str, Any] = field(default_factory=dict)
    #: Number of blocks in CPU memory. 0: as many as the GPU has.
    cpu_blocks: int = 0
    #: The secondary tier of OffloadingConnector: fs (files), or "" for none.
    tier: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))  # a schedule from JSON has lists
        object.__setattr__(self, "multi", tuple(self.multi))
        if self.connector == "nixl-offload":
            object.__setattr__(self, "offloading", self.offloading or "last")
        several, simple = self.ranks > 1, self.connector == "simple-offload" or self.simple_offloading
        cannot_share = self.pipeline or self.several_groups or self.block_size % self.ranks
        not_by_nixl = self.real_transfers and self.connector not in BY_NIXL
        of_server = (self.connector, self.ranks, self.chunk_size) == ("mp", 1, SERVER_CHUNK)
        refused: dict[str, Any] = {
            "the lab plays a MultiConnector only with one rank": several and (self.beside or self.offloading),
            f"the lab plays two engines with several ranks only with {', '.join(WITH_RANKS)}": (
                self.connector in PAIRS and self.connector not in WITH_RANKS and (several or self.peer_ranks)
            ),
            "the lab plays pipeline parallelism only with more than one rank and without a drafter": (
                self.pipeline and (not several or self.drafter)
            ),
            "the lab plays context parallelism only with mp, with several ranks that share each block's tokens, "
            "without pipeline parallelism and with one KV group": (
                self.context and (self.connector != "mp" or not several or cannot_share)
            ),
            f"the lab plays real transfers only with {', '.join(BY_NIXL)}": not_by_nixl,
            "the lab plays SimpleCPUOffloadConnector only alone, or with v1 if the option `offloading` is set": (
                self.simple_offloading and (self.connector != "v1" or not self.offloading)
            ),
            "the SimpleCPUOffloadConnector does nothing without prefix caching": simple and not self.prefix_caching,
            "the lab plays states with prefix caching, without sliding windows and with fewer drafts than a block has "
            "tokens, because the blocks of models with states have hundreds of tokens": (
                self.states and (self.windows or not self.prefix_caching or self.drafts >= self.block_size)
            ),
            "the lab plays a real server with mp, without a MultiConnector, with one rank, one KV group and chunks of "
            f"{SERVER_CHUNK} tokens": self.real_server and (not of_server or self.several_groups or self.offloading),
        }
        for why, is_so in refused.items():
            if is_so:
                raise ValueError(why)

    @property
    def several_groups(self) -> bool:
        return bool(self.windows) or self.states

    @property
    def heads_of_rank(self) -> int:
        """Return the number of KV heads of a rank (config/model.py 0.32.0:get_num_kv_heads)."""
        return max(1, self.kv_heads // self.ranks)

    @property
    def block_of_rank(self) -> int:
        """Return how many tokens of a full-attention block one rank has."""
        return self.block_size // self.ranks if self.context else self.block_size

    @property
    def any_connector(self) -> bool:
        """Return True for a connector that the lab does not know."""
        return self.connector not in CONNECTORS

    @property
    def steps_in_flight(self) -> int:
        """Return the maximum number of steps in flight (`max_concurrent_batches`, config/vllm.py 0.32.0:577)."""
        if self.pipeline:
            return self.ranks + (self.async_scheduling and self.model_runner_v2)
        return 2 if self.async_scheduling else 1

    @property
    def asked_before(self) -> int:
        """Return how many connectors vLLM asks before LMCache's connector."""
        return self.beside + (self.offloading == "first") + (bool(self.multi) and not self.lmcache_first)

    @property
    def changed(self) -> list[str]:
        """Return the names of options (no sizes) that differ from defaults, and the keys of `lmcache` and `extra`."""
        kinds = bool, str, tuple[int, ...], tuple[str, ...]
        no_sizes = [each for each in fields(self) if each.type in kinds or each.name.endswith("ranks")]
        changed = [each.name for each in no_sizes if getattr(self, each.name) != each.default]
        return [*(name for name in changed if name != "connector"), *self.lmcache, *self.extra]
