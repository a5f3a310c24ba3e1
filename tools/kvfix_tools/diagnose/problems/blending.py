"""CacheBlend in the engine's own process (`enable_blending`): settings, prompts and hits that it cannot blend."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_IN_PROCESS = ("LMCacheConnectorV1", "MultiConnector")
_BLENDER = "lmcache/v1/compute/blend/blender.py"

PROBLEMS = (
    Problem(
        code="KVD406",
        name="blend-settings-missing",
        severity=Severity.CRASH,
        title="CacheBlend has no layer to check or no share to compute again, and the first blended request kills it.",
        shows=(
            Failed(
                kind="AssertionError",
                source="assert self.common_metadata.recomp_ratios is not None",
                within="blender.py:process_qkv",
                at=_BLENDER,
            ),
            Failed(kind="TypeError", text="argument of type 'NoneType' is not", within="blender.py:process_qkv", at=""),
        ),
        sentence="blend_check_layers or blend_recompute_ratios is not set",
        connectors=_IN_PROCESS,
        cause="blend_check_layers and blend_recompute_ratios have no default (None), and process_qkv needs both: the "
        "layers at which it compares, and the share of tokens that is computed again from there on. The old name "
        "blend_recompute_ratio is not the same setting.",
        now="blend_check_layers: [1] and blend_recompute_ratios: [0.15] (LMCACHE_BLEND_CHECK_LAYERS=1, "
        "LMCACHE_BLEND_RECOMPUTE_RATIOS=0.15), and restart",
        good="keep it so: no release has a default (0.5.6)",
        threads=(_LMCACHE + "issues/4131",),
    ),
    Problem(
        code="KVD407",
        name="blend-of-a-part",
        severity=Severity.CRASH,
        title="CacheBlend got the KV of fewer tokens than it computes, and the worker dies.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="The size of tensor a (<computed>) must match the size of tensor b (<loaded>)",
                within="blender.py:process_qkv",
            ),
            Failed(
                kind="RuntimeError",
                text="The size of tensor a (<computed>) must match the size of tensor b (<loaded>)",
                within="blender.py:blend_layer",
            ),
        ),
        said=(
            r"(?i)blend",
            r"(?i)lookup",
            r"(?i)\bevict",
            r"(?i)fewer|\bonly\b|less than|TOCTOU|process_qkv|must match",
        ),
        sentence="{computed} tokens are computed, KV of {loaded} is loaded",
        connectors=_IN_PROCESS,
        cause="The buffer of loaded KV reaches from the first segment that was found to the last, the computed keys "
        "over all tokens that were hit. They differ where vLLM's own prefix cache has the beginning (those segments "
        "are masked), where a segment was evicted since the lookup, or where the whole prompt is stored: its last "
        "token is left out, so the last segment hashes differently and is not found.",
        now="--no-enable-prefix-caching, a max_local_cpu_size that need not evict, and a new text after the last "
        "separator (the question) in every prompt; or LMCACHE_ENABLE_BLENDING=False; restart",
        good="no release of LMCacheConnectorV1 is right yet (0.5.6 has the same note)",
        sure=False,
        threads=(_LMCACHE + "issues/938", _LMCACHE + "issues/4133"),
    ),
    Problem(
        code="KVD408",
        name="blend-of-nothing",
        severity=Severity.CRASH,
        title="CacheBlend has nothing loaded to blend with, and the worker dies.",
        shows=(
            Failed(kind="ValueError", text="Layer <layer> is not loaded into GPU buffer."),
            Failed(kind="ValueError", within="gpu_connector.py:get_kv"),
            Failed(kind="ValueError", within="gpu_connectors.py:get_kv"),
        ),
        sentence="the load found no segment of the request",
        connectors=_IN_PROCESS,
        cause="The lookup promised a hit, and when the load looked again its first segment was not there: evicted "
        "meanwhile, or masked by vLLM's own prefix cache. The load then gives no layer, and the blender takes one.",
        now="--no-enable-prefix-caching and a larger max_local_cpu_size; or LMCACHE_ENABLE_BLENDING=False; restart",
        good="no release of LMCacheConnectorV1 is right yet (0.5.6)",
        sure=False,
        threads=("https://github.com/LMCache/LMCache/issues/3229", "https://github.com/LMCache/LMCache/issues/1943"),
    ),
    Problem(
        code="KVD409",
        name="blend-prompt-below-separator",
        severity=Severity.CRASH,
        title="A prompt has fewer tokens than CacheBlend's separator, and LMCache cannot split it.",
        shows=(
            Failed(
                kind="RuntimeError",
                text="maximum size for tensor at dimension 0 is <tokens> but size is <separator>",
                within="token_database.py:_fast_split_by_subtensor",
            ),
        ),
        sentence="the prompt has {tokens} tokens, the separator {separator}",
        connectors=_IN_PROCESS,
        cause="_fast_split_by_subtensor gives such a prompt as a whole, as it should, and goes on to look for the "
        "separator in it: a window of more tokens than there are.",
        now="a shorter blend_special_str (LMCACHE_BLEND_SPECIAL_STR), and no prompt below it; or "
        "LMCACHE_ENABLE_BLENDING=False; restart",
        good="no release of LMCache is right yet (0.5.6 goes on after the short prompt)",
    ),
    Problem(
        code="KVD410",
        name="blend-wants-tensor",
        severity=Severity.CRASH,
        title="CacheBlend splits token ids as a tensor and gets a list.",
        shows=(
            Failed(
                kind="AttributeError",
                text="'list' object has no attribute '",
                within="token_database.py:_fast_split_by_subtensor",
            ),
        ),
        sentence="the token ids are a list",
        connectors=_IN_PROCESS,
        releases={"lmcache": "<0.3.9"},
        cause="These releases hand token ids on as a list, and SegmentTokenDatabase, which CacheBlend uses, takes "
        "only a tensor.",
        now="LMCACHE_ENABLE_BLENDING=False (enable_blending: false), restart; or pip install lmcache==0.4.1",
        fixed={"lmcache": "0.3.9"},
        threads=(_LMCACHE + "issues/1412",),
    ),
    Problem(
        code="KVD1790",
        name="blend-hits-lead-only",
        severity=Severity.SLOW,
        title="CacheBlend in vLLM's own process reuses fewer segments than are stored, or none.",
        shows=(),
        said=(
            r"(?i)lmcache|cacheblend|blend_(?:kv|special_str)",
            r"(?i)cacheblend|enable_blending|\bblend(?:ing|s|ed|_kv\w*)?\b",
            r"(?i)\bhits?\b|reus|retriev|match|\bblends? any|selected for blending|\bstored\b",
            r"(?i)\blow(?:er)?\b[^\n]{0,20}hit|non-prefix|only (?:\w+ ){0,3}prefix|prefix match|(?:n't|not|never|no)\b"
            r"[^\n.]{0,30}(?:blend|\bhits?\b|reus|retriev|stored)|\bmis-?match|prevents? [^\n.]{0,30}match"
            r"|Retrieved 0|hit tokens: 0",
        ),
        connectors=_IN_PROCESS,
        cause="In this order. A lookup ends at the first segment that is not stored (cache_engine.py, lookup): with "
        "another question or system prompt in front, nothing behind it is a hit. Segments are stored cut: at whole "
        "`chunk_size` before 0.3.9.post2, by chunked prefill in every release. The separator is "
        "`encode(blend_special_str)[1:]`: without a begin token (Qwen) it lacks a token, and in a text it may merge "
        "with its neighbours.",
        now="shared documents first and what is new (the question) after the last separator; prompts as token ids, "
        "part for part and the separator's ids between them, as in examples/blend_kv_v1/blend.py; "
        "--no-enable-prefix-caching, and a --max-num-batched-tokens that is larger than the prompts; LMCache 0.3.10 or "
        "newer. `LMCache hit tokens` says how far the hits went",
        good="no release of LMCacheConnectorV1 finds segments behind a miss (0.5.6)",
        sure=False,
        threads=(_LMCACHE + "issues/3238", _LMCACHE + "issues/2026", _LMCACHE + "issues/1136"),
    ),
    Problem(
        code="KVD494",
        name="old-blend-with-prefix-caching",
        severity=Severity.CRASH,
        title="The old CacheBlend got a part of the prompt only.",
        shows=(Failed(kind="AssertionError", source="assert fk.shape == rk.shape"),),
        cause="It blends the KV of whole prompts, and vLLM computed a part: with chunked prefill, or after a hit in "
        "its own prefix cache.",
        now="enable_chunked_prefill=False and enable_prefix_caching=False (--no-enable-chunked-prefill "
        "--no-enable-prefix-caching)",
        good="LMCache 0.3.9 or newer with enable_blending on the V1 engine",
        threads=("https://github.com/LMCache/LMCache/issues/409",),
    ),
    Problem(
        code="KVD495",
        name="old-blend-of-other-release",
        severity=Severity.CRASH,
        title="lmcache_vllm and LMCache are of different times.",
        shows=(Failed(kind="AttributeError", text="'LMCacheEngineConfig' object has no attribute 'blend_<what>'"),),
        sentence="blend_{what} is not known",
        cause="lmcache_vllm (the adapter for vLLM before 0.8) reads settings that a newer lmcache no longer has.",
        now="pip uninstall lmcache_vllm; today's LMCache needs no adapter: --kv-transfer-config "
        '\'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\' with enable_blending: true',
        good="LMCache 0.3.9 or newer with the vLLM of its matrix",
        threads=("https://github.com/LMCache/LMCache/issues/396",),
    ),
)
