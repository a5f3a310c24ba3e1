"""KV groups of a model that vLLM cannot lay out: page sizes, parallel parts, pages that do not divide."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_UTILS = "vllm/v1/core/kv_cache_utils.py"
_NEVER = "keep it so: the set-up was wrong, and no release changes that"

PROBLEMS = (
    Problem(
        code="KVD368",
        name="context-parallel-and-hybrid",
        severity=Severity.CRASH,
        title="Context parallelism does not go with this model's kinds of attention.",
        shows=(
            Failed(kind="AssertionError", text="PCP only supports full attention and replicated draft groups."),
            Failed(kind="AssertionError", text="DCP with hybrid KV cache layouts only supports full-attention, Mamba"),
            Failed(kind="AssertionError", text="DCP not support sliding window."),
            Failed(kind="AssertionError", text="DCP not support hybrid attn now"),
            Failed(kind="AssertionError", text="PCP not support hybrid attn now"),
        ),
        cause="With --decode-context-parallel-size or --prefill-context-parallel-size above 1 each rank holds a part "
        "of the tokens; vLLM has that for full attention only (and for drafts that every rank holds whole). This "
        "model has a group of another kind: sliding window, chunked, or Mamba.",
        now="--decode-context-parallel-size 1 --prefill-context-parallel-size 1 (more --tensor-parallel-size in their "
        "place); or, where the model allows it, --disable-hybrid-kv-cache-manager",
        good=_NEVER,
    ),
    Problem(
        code="KVD369",
        name="page-sizes-differ",
        severity=Severity.CRASH,
        title="The model's layers have KV pages of different sizes, and vLLM was asked for one size.",
        shows=(
            Failed(
                kind="AssertionError",
                within="kv_cache_utils.py:get_uniform_page_size",
                source="assert len(page_sizes) == 1",
            ),
            Failed(
                kind="AssertionError",
                within="kv_cache_utils.py:get_kv_cache_config_from_groups",
                text="cannot pad pages",
            ),
        ),
        releases={"vllm": ">=0.20"},
        sure=False,
        cause="A page is block_size * bytes of a token in one layer. Kinds of attention, head counts, an fp8 cache "
        "for some layers only or a draft model of another shape give several sizes; vLLM makes them equal by a larger "
        "block for the small ones, where they divide.",
        now="--kv-cache-dtype auto; a --block-size that is a multiple of both; without --speculative-config to see "
        "whether the draft model is it",
        good=_NEVER,
    ),
    Problem(
        code="KVD382",
        name="workers-have-different-block-counts",
        severity=Severity.CRASH,
        title="The workers do not all have the same number of KV blocks.",
        shows=(
            Failed(
                kind="AssertionError",
                within="kv_cache_utils.py:generate_scheduler_kv_cache_config",
                source="cfg.num_blocks == kv_cache_configs[0].num_blocks",
                at=_UTILS,
            ),
        ),
        sure=False,
        cause="vLLM gives every worker the smallest count of all ranks; it comes out uneven only if a worker makes "
        "its own (a plugin's platform or worker class), or with several KV groups under pipeline parallelism.",
        now="--num-gpu-blocks-override with the smallest count that the log names (`GPU KV cache size: ... tokens` "
        "divided by the block size), the same for all; --pipeline-parallel-size 1",
        good="a worker class that takes the number of blocks that it is given",
    ),
    Problem(
        code="KVD385",
        name="layers-in-no-group",
        severity=Severity.CRASH,
        title="A pipeline rank has layers that are in none of the model's KV groups.",
        shows=(Failed(kind="AssertionError", text="Some layers are not assigned to any group.", at=_UTILS),),
        releases={"vllm": "<0.33"},
        sure=False,
        cause="The groups are made of all ranks' layers together, by name. A rank whose layer has the same name and "
        "another kind, or a draft model that only the last rank has, is left over.",
        now="--pipeline-parallel-size 1; or without --speculative-config",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right",
    ),
    Problem(
        code="KVD405",
        name="block-size-not-of-hash-blocks",
        severity=Severity.CRASH,
        title="A KV group's block size is no multiple of the unit in which vLLM hashes prompts.",
        shows=(
            Failed(
                kind="AssertionError",
                text="Each KV cache group's real block_size must be divisible by hash_block_size. "
                "block_sizes=<sizes>, hash_block_size=<unit>",
            ),
            Failed(kind="ValueError", text="block_size (<sizes>) must be a multiple of hash_block_size (<unit>)"),
            Failed(
                kind="AssertionError",
                within="manager.py:__init__",
                source="assert self.block_size % self.hash_block_size == 0",
            ),
        ),
        cause="Prefix hashes are made every hash_block_size tokens, and each KV group looks its blocks up by them. "
        "The sizes of a hybrid model's groups (Mamba, GDN: hundreds of tokens) share no such unit with --block-size.",
        now="--prefix-match-unit with a number that divides all sizes in the line (vLLM 0.26 or newer); else the "
        "default --block-size, and --no-enable-prefix-caching",
        good="--prefix-match-unit given for this model",
        releases={"vllm": ">=0.20"},
        sure=False,
    ),
    Problem(
        code="KVD433",
        name="blocks-cannot-be-zeroed",
        severity=Severity.CRASH,
        title="vLLM cannot zero the blocks of a KV layer: its layout is not the one that it expects.",
        shows=(
            Failed(
                kind="AssertionError", text="<layer>: <rows> kernel blocks is not a multiple of <blocks> logical blocks"
            ),
            Failed(kind="AssertionError", within="utils.py:__init__", source="assert block_stride_bytes % 4 == 0"),
            Failed(kind="AssertionError", within="utils.py:__init__", source="assert kernel_page_bytes % 4 == 0"),
            Failed(kind="AssertionError", within="utils.py:__init__", source="assert (dp + off_bytes) % 4 == 0"),
        ),
        releases={"vllm": ">=0.20"},
        sure=False,
        cause="Hybrid models have their new blocks zeroed, four bytes at a time, in whole blocks of the scheduler: "
        "the layer's rows have to be a multiple of num_blocks, and a block's bytes of four. A cache that a connector "
        "laid out (one tensor across layers), an odd head size with fp8, or a plugin's attention backend breaks it.",
        now="--kv-cache-dtype auto; without the connector to see whether the layout is its own; "
        "--disable-hybrid-kv-cache-manager",
        good="report it with `kvfix-diagnose LOG --issue FILE.md`: no release is known to be right",
    ),
    Problem(
        code="KVD434",
        name="kv-caches-bound-twice",
        severity=Severity.CRASH,
        title="A worker makes its KV caches a second time.",
        shows=(
            Failed(
                kind="AssertionError",
                within="utils.py:bind_kv_cache",
                source="assert len(runner_kv_caches) == 0",
                at="vllm/v1/worker/utils.py",
            ),
            Failed(
                kind="AssertionError",
                within="vllm_v1_adapter.py:register_kv_caches",
                source="assert len(self.kv_caches) == 0 and len(kv_caches) > 0",
            ),
        ),
        sure=False,
        cause="initialize_from_config ran again in the same worker: a scale-up (elastic EP), a reload of weights that "
        "makes the caches anew, or a plugin that calls it. LMCache's assertion also fails if the model has no "
        "attention layer on this rank: then kv_caches is empty.",
        now="a new process in place of the reload; with pipeline parallelism: an attention layer on every rank",
        good="keep it so: neither vLLM nor LMCache 0.5.6 lets the caches be registered twice",
    ),
    Problem(
        code="KVD446",
        name="gpu-memory-held-by-others",
        general=True,
        severity=Severity.CRASH,
        title="The GPU has less free memory at the start than --gpu-memory-utilization asks for.",
        shows=(
            Failed(kind="ValueError", text="Free memory on device"),
            Failed(kind="ValueError", text="Externally held weights on device"),
        ),
        cause="--gpu-memory-utilization is a share of the whole card, taken as free at the start. Something holds a "
        "part of it: an engine that has not ended yet, another engine on the same card (prefill and decode together), "
        "LMCache's server with its own GPU buffers.",
        now="nvidia-smi shows who holds it: end what is left of the last run; else --gpu-memory-utilization at most "
        "(free / total), for each of those that share the card",
        good="shares of all processes of a card that add up to 0.95 at most",
    ),
    Problem(
        code="KVD1087",
        name="more-than-two-kinds-of-attention",
        severity=Severity.CRASH,
        title="vLLM's prefix cache takes a model with two kinds of attention only, and this one has another mix.",
        shows=tuple(
            Failed(text=text, at="vllm/v1/core/kv_cache_coordinator.py")
            for text in (
                "HybridKVCacheCoordinator assumes exactly one type of full attention groups now",
                "HybridKVCacheCoordinator assumes exactly one other type of groups now",
                "HybridKVCacheCoordinator assumes exactly one type of other groups now",
                "KVCacheCoordinator assumes the block_size of full attention layers is divisible by other layers now",
                "HybridKVCacheCoordinator assumes the full attention group ids and other attention group ids do not "
                "interleave",
            )
        ),
        releases={"vllm": ">=0.10,<0.12"},
        cause="Up to vLLM 0.11 the hybrid KV cache manager wants one kind of full attention, one other kind, and "
        "block sizes that divide. A third kind, a draft model of another shape, or a Mamba page that does not fit is "
        "refused. No connector has part in it.",
        now="--no-enable-prefix-caching, or without Mamba layers --disable-hybrid-kv-cache-manager; without "
        "--speculative-config if a draft model brings the third kind; restart",
        good="vLLM 0.15.1 or newer, which takes any mix",
    ),
)
