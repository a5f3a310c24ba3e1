"""What a lab engine is made with: everything that changes token accounting."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A connector that the lab knows."""

    #: The class that vLLM loads.
    name: str
    #: module:class of the lab.
    side: str
    #: Releases that the lab plays, and why not the others: {distribution: (specifier, why)}.
    needs: dict[str, tuple[str, str]]
    #: Where the class is, if vLLM would prefer another of this name.
    module: str | None = None


_SINCE_0_32 = {"vllm": (">=0.32", "earlier ones were not tried")}
_WITH_LMCACHE = {**_SINCE_0_32, "lmcache": (">=0.5.6", "earlier ones were not tried")}
KNOWN = {
    "v1": Known(
        "LMCacheConnectorV1",
        "v1:V1",
        {
            "lmcache": (">=0.3.9", "earlier ones do not import under vLLM 0.11 and later"),
            "vllm": (">=0.11.2", "earlier ones were not tried"),
        },
    ),
    "mp": Known(
        "LMCacheMPConnector",
        "mp:MP",
        {
            "lmcache": (">=0.4.5", "earlier ones have no connector that vLLM takes for LMCacheMPConnector"),
            "vllm": (">=0.22.0", "LMCache's connector imports what earlier ones do not have"),
        },
        "lmcache.integration.vllm.lmcache_mp_connector",
    ),
    "mp-in-tree": Known(
        "LMCacheMPConnectorUpstream",
        "mp:MP",
        {
            "lmcache": (
                ">=0.4.4,<0.4.7",
                "vLLM's copy does not import with earlier ones. With later ones it ends with a TypeError when the "
                "engine starts: it hands ParallelStrategy seven arguments (vllm lmcache_mp_connector.py 0.32.0, "
                "0.33.0:120) where 0.4.7 takes five (lmcache vllm_multi_process_adapter.py 0.4.7:284), and the adapter "
                "a server_url (:131) where 0.5.0 to 0.5.6 take server_urls (0.5.6:673)",
            ),
            "vllm": (">=0.22.0", "the copy in earlier ones was not tried"),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
    ),
    "offloading": Known("OffloadingConnector", "offloading:OffloadingAlone", _SINCE_0_32),
    "simple-offload": Known("SimpleCPUOffloadConnector", "simple_offload:SimpleOffload", _SINCE_0_32),
    "nixl-pull": Known("NixlConnector", "nixl:NixlSide", _SINCE_0_32),
    "nixl-push": Known("NixlPushConnector", "nixl_push:PushSide", _SINCE_0_32),
    "nixl-multi": Known("NixlConnector", "nixl_multi:NixlMultiSide", _WITH_LMCACHE),
    "nixl-push-multi": Known("NixlPushConnector", "nixl_multi:PushMultiSide", _WITH_LMCACHE),
    "nixl-offload": Known("NixlConnector", "nixl_offload:OffloadSide", _SINCE_0_32),
    "mooncake": Known("MooncakeConnector", "mooncake:MooncakeSide", _SINCE_0_32),
    "mooncake-multi": Known("MooncakeConnector", "mooncake_multi:MooncakeMultiSide", _WITH_LMCACHE),
}
CONNECTORS = tuple(KNOWN)
#: Two engines, one for prefill and one for decode.
PAIRS = tuple(each for each in CONNECTORS if each.startswith(("nixl", "mooncake")))
#: Those of them that may have several ranks, and not as many on both sides.
WITH_RANKS = ("nixl-pull", "nixl-push")
#: Those whose transfers NIXL makes.
BY_NIXL = tuple(each for each in PAIRS if each.startswith("nixl"))
#: Those with which two engines may share a cache (neighbours.py).
SHARED = ("v1", "mp")
#: vLLM's own, which have nothing of LMCache.
OF_VLLM = ("offloading", "simple-offload")
#: Tokens in a chunk of the real server: it has one size.
SERVER_CHUNK = 16


@dataclass(frozen=True)
class Options:
    """Sizes in tokens, but `num_blocks` in blocks. `lmcache`: settings of LMCache by their own names."""

    #: v1 (in process), mp (LMCache's multi-process connector), mp-in-tree (vLLM's copy of it), or one of OF_VLLM. Any
    #: other one by what vLLM calls it, or as my_package.connector:MyConnector (any_connector.py).
    connector: str = "v1"
    #: Of any other connector: its `kv_connector_extra_config`, and the function that loses what it has stored.
    config: dict[str, Any] = field(default_factory=dict)
    lose: str = ""
    #: Layers of each KV group. More than one with any other connector only.
    layers: int = 1
    #: In a MultiConnector, behind another one that is asked first (connector.py). v1 only.
    beside: bool = False
    #: In a MultiConnector with vLLM's OffloadingConnector (offloading.py), which is asked first or last; "": without.
    offloading: str = ""
    #: It is vLLM's SimpleCPUOffloadConnector that offloads (simple_offload.py), not the OffloadingConnector. v1 only.
    simple_offloading: bool = False
    #: Steps that a lookup, load or store of the multi-process server takes, 0: none. A copy of the
    #: OffloadingConnector takes twice as many.
    delay: int = 1
    #: Workers, the ranks of tensor parallelism. One, in a MultiConnector.
    ranks: int = 1
    #: They are the ranks of pipeline parallelism instead: a step is scheduled while others are with the workers.
    pipeline: bool = False
    #: They are the ranks of decode context parallelism (DCP): each has the KV of its share of the tokens, and a block
    #: has `block_size` tokens of all. mp only: the other connectors take a block for that of one rank (lmcache
    #: vllm_v1_adapter.py 0.5.6:396), store nothing (:1159), and end the worker at the first load (:815).
    context: bool = False
    #: Steps that a transfer takes longer in the second rank. Not v1.
    rank_delay: int = 0
    #: That server is a real `lmcache server` (mp_real.py), for one rank with one KV group. mp only, alone.
    real_server: bool = False
    block_size: int = 16
    num_blocks: int = 64
    chunk_size: int = 64
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 8
    max_model_len: int = 2048
    prefix_caching: bool = True
    #: Admit a request only if all of it fits (vLLM's default since it has the option; before, the first chunk decided).
    reserve_full_isl: bool = True
    #: Which request is first: fcfs, or priority, by the number that each request has.
    policy: str = "fcfs"
    #: Beside the KV group of full attention one for each of these sliding windows, in tokens. mp and OF_VLLM.
    windows: tuple[int, ...] = ()
    #: A block of these groups has so many times the tokens of one of full attention.
    window_blocks: int = 1
    #: Beside the KV group of full attention one of states, as Mamba layers have in mode "align". mp only.
    states: bool = False
    #: The server keeps the KV groups of a chunk under keys of their own (`--separate-object-groups`).
    separate_object_groups: bool = False
    #: A step is scheduled before the answer of the last one is there, as vLLM does by itself on a GPU.
    async_scheduling: bool = False
    #: For vLLM's model runner V2, which it takes for most models on a GPU: a resumed request comes as a new one.
    model_runner_v2: bool = False
    #: With a drafter vLLM asks a worker what is done, and what has failed, before it has the step saved.
    save_last: bool = False
    #: Speculative decoding: who drafts (ngram, eagle, or mtp with a module for each draft); "": none. ngram proposes
    #: only what it finds, where scheduling is not asynchronous.
    drafter: str = ""
    #: Tokens that it drafts in a step.
    drafts: int = 0
    #: Of 100 drafts, so many are what the model samples.
    acceptance: int = 0
    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    lmcache: dict[str, Any] = field(default_factory=dict)
    #: Two engines with one cache (neighbours.py). v1 and mp.
    neighbours: bool = False
    #: Of the decode engine (pair.py): its blocks, where it has not as many as the prefill engine.
    decode_blocks: int = 0
    #: Of the other engine of a pair: its ranks, where it has not as many; and the KV heads of the model, which ranks
    #: share, or have each one of where there are fewer.
    peer_ranks: int = 0
    kv_heads: int = 1
    #: Those of the two engines, by name, that have LMCache's in-process connector too (pair_multi.py); and whether
    #: vLLM asks it first.
    multi: tuple[str, ...] = ()
    lmcache_first: bool = False
    #: NIXL itself makes the transfers (nixl_real.py), not the lab's model of it. BY_NIXL.
    real_transfers: bool = False
    #: Settings of one of OF_VLLM or PAIRS, or of what offloads beside v1, by their own names
    #: (`kv_connector_extra_config`).
    extra: dict[str, Any] = field(default_factory=dict)
    #: Blocks that its CPU memory has room for; 0: as many as the GPU has.
    cpu_blocks: int = 0
    #: What is behind that memory: fs (files) or "".
    tier: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))  # JSON has lists
        object.__setattr__(self, "multi", tuple(self.multi))
        if self.connector == "nixl-offload":
            object.__setattr__(self, "offloading", self.offloading or "last")
        if self.ranks > 1 and (self.beside or self.offloading):
            raise ValueError("the lab plays a MultiConnector with one rank")
        if self.connector in PAIRS and self.connector not in WITH_RANKS and (self.ranks > 1 or self.peer_ranks):
            raise ValueError(f"the lab plays two engines with several ranks with {', '.join(WITH_RANKS)}")
        if self.pipeline and (self.ranks == 1 or self.drafter):
            raise ValueError("the lab plays pipeline parallelism with more than one rank and without a drafter")
        if self.context and (
            self.connector != "mp"
            or self.ranks == 1
            or self.pipeline
            or self.several_groups
            or self.block_size % self.ranks
        ):
            raise ValueError(
                "the lab plays context parallelism with mp, which alone knows it, with more than one rank that share "
                "each block's tokens, without pipeline parallelism and with one KV group"
            )
        if self.real_transfers and self.connector not in BY_NIXL:
            raise ValueError(f"the lab plays real transfers with {', '.join(BY_NIXL)}")
        if self.simple_offloading and (self.connector != "v1" or not self.offloading):
            raise ValueError("the lab plays the SimpleCPUOffloadConnector alone and, by `offloading`, beside v1")
        if (self.connector == "simple-offload" or self.simple_offloading) and not self.prefix_caching:
            raise ValueError("the SimpleCPUOffloadConnector does nothing without prefix caching")
        if self.states and (self.windows or not self.prefix_caching or self.drafts >= self.block_size):
            raise ValueError(
                "the lab plays states with prefix caching, without sliding windows and with fewer drafts than a block "
                "has tokens: the blocks of models with states have hundreds"
            )
        if self.real_server and (
            (self.connector, self.ranks, self.chunk_size) != ("mp", 1, SERVER_CHUNK)
            or self.several_groups
            or self.offloading
        ):
            raise ValueError(
                "the lab plays a real server with mp, without a MultiConnector, with one rank, one KV group and chunks "
                f"of {SERVER_CHUNK} tokens"
            )

    @property
    def several_groups(self) -> bool:
        """Whether the model has several KV groups."""
        return bool(self.windows) or self.states

    @property
    def heads_of_rank(self) -> int:
        """KV heads that a rank has (config/model.py 0.32.0:get_num_kv_heads)."""
        return max(1, self.kv_heads // self.ranks)

    @property
    def block_of_rank(self) -> int:
        """Tokens of a block of full attention whose KV one rank has."""
        return self.block_size // self.ranks if self.context else self.block_size

    @property
    def any_connector(self) -> bool:
        """Whether it is none of those that the lab knows."""
        return self.connector not in CONNECTORS

    @property
    def steps_in_flight(self) -> int:
        """Steps that are scheduled before the answer of the first of them is there (`max_concurrent_batches`,
        config/vllm.py 0.32.0:577)."""
        if self.pipeline:
            return self.ranks + (self.async_scheduling and self.model_runner_v2)
        return 2 if self.async_scheduling else 1

    @property
    def asked_before(self) -> int:
        """Connectors of the MultiConnector that vLLM asks before LMCache's."""
        return self.beside + (self.offloading == "first") + (bool(self.multi) and not self.lmcache_first)

    @property
    def changed(self) -> list[str]:
        """What is not as it comes: settings of LMCache, and options that are no sizes by their own names."""
        no_sizes = [
            each
            for each in fields(self)
            if (each.type in ("bool", "str", "tuple[int, ...]", "tuple[str, ...]") or each.name.endswith("ranks"))
            and each.name != "connector"
        ]
        changed = [each.name for each in no_sizes if getattr(self, each.name) != each.default]
        return [*changed, *self.lmcache, *self.extra]
