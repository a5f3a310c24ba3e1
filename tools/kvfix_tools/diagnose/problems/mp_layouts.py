"""What the server and its clients cannot cut or read: chunks against blocks, layouts that no format describes."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Problem

_MP = ("LMCacheMPConnector", "MultiConnector")
_VIEW = "lmcache/v1/multiprocess/group_view.py"
_UTILS = "lmcache/v1/gpu_connector/utils.py"

PROBLEMS = (
    Problem(
        code="KVD1112",
        name="grpc-older-than-its-stubs",
        severity=Severity.CRASH,
        title="The installed grpcio is older than the one that LMCache's code was generated for.",
        shows=(
            Failed(
                kind="RuntimeError", text="The grpc package installed is at version <version>, but the generated code"
            ),
        ),
        sentence="grpcio {version} is too old",
        cause="LMCache 0.5.5 and newer bring generated gRPC code, which looks for its grpcio when it is loaded. vLLM "
        "or another package has pinned an older one (pip install --no-deps, or an image's own).",
        now="pip install -U grpcio to the version that the message names, in the environment of vLLM and of the "
        "server; restart both",
        good="an image or environment whose grpcio was resolved together with LMCache (pip check says so)",
    ),
    Problem(
        code="KVD1114",
        name="layout-not-read",
        severity=Severity.CRASH,
        title="LMCache cannot read the shape of this model's KV cache.",
        shows=(
            Failed(kind="ValueError", text="tensor does not look like stacked KV", at=_UTILS),
            Failed(kind="ValueError", text="Expected token2d dim=3, got", at=_UTILS),
            Failed(kind="ValueError", text="Expected k/v 4D [NB,BS,NH,HS], got", at=_UTILS),
            Failed(kind="ValueError", text="MLA expects kv_cache_layer as Tensor", at=_UTILS),
            Failed(kind="ValueError", text="does not have one paged tensor per layer"),
            Failed(kind="AssertionError", within="utils.py:assert_is_vllm_flash_attn_or_flash_infer"),
            Failed(kind="AssertionError", within="utils.py:assert_is_vllm_mla_or_flash_attn_or_flash_infer"),
            Failed(kind="ValueError", text="tensor is non-contiguous and not a supported"),
        ),
        releases={"lmcache": ">=0.4.3"},
        sure=False,
        cause="Each attention backend has its own order of axes, and LMCache knows those of a list "
        "(gpu_connector/kv_format). The one of this model, backend or platform is not among them: a new model, "
        "--attention-backend, --kv-cache-dtype, a block size of its own.",
        now="start with --attention-backend FLASH_ATTN --kv-cache-dtype auto (MLA: the default backend); if it is "
        "the same, without --kv-transfer-config for this model",
        good="a release of LMCache that lists the model; report the line `Engine KV Format` with the shapes",
    ),
    Problem(
        code="KVD1116",
        name="chunk-ends-within-a-block",
        severity=Severity.CRASH,
        title="The server's chunks do not end where the blocks of a KV group end.",
        shows=(Failed(kind="ValueError", text="align to group <group> tokens_per_block <block>", at=_VIEW),),
        sentence="KV group {group} has blocks of {block} tokens",
        connectors=_MP,
        releases={"lmcache": ">=0.4.7"},
        cause="A chunk is stored as whole blocks of every KV group. Hybrid models (Qwen3.5, Mamba, GDN) have large "
        "blocks that are no power of two (544, 1056), and the server's default of 256 tokens does not hold them.",
        now="lmcache server --chunk-size <a multiple of every group's tokens_per_block, as the server's line "
        "`KernelGroupInfo` has them> (544: --chunk-size 544), an empty L2, restart server and vLLM",
        good="the same --chunk-size for all engines of this model; a server of its own for it",
    ),
    Problem(
        code="KVD1644",
        name="server-back-with-other-chunks",
        severity=Severity.CRASH,
        title="The LMCache server came back with another chunk size, and the engines count in the old one.",
        shows=(
            Failed(
                kind="AssertionError",
                text="start (<start>) must be a multiple of chunk_size (<chunk>)",
                at="lmcache/v1/multiprocess/session.py",
            ),
            Failed(
                kind="AssertionError",
                text="end (<end>) must be a multiple of chunk_size (<chunk>)",
                at="lmcache/v1/multiprocess/session.py",
            ),
            Failed(
                kind="AssertionError",
                text="The number of block hashes should be greater than or equal to the number of LMCache hit blocks",
            ),
        ),
        connectors=_MP,
        releases={"lmcache": ">=0.3.14"},
        cause="The connector asks for the chunk size once, at its start, and a lookup is answered in chunks. Of a "
        "server that came back with larger chunks a store ends in the middle of one (`must be a multiple`); with "
        "smaller ones the hit is multiplied by a size that is too large, and reaches beyond the prompt's blocks.",
        now="restart all engines of this server; start the server with the --chunk-size that it had before",
        good="--chunk-size written into the server's unit; no release up to 0.5.6 asks for it again",
        sure=False,
    ),
    Problem(
        code="KVD1666",
        name="model-path-with-an-at-sign",
        severity=Severity.SLOW,
        title="The model's name has an `@`, which the LMCache server's keys do not take: nothing is cached.",
        shows=(
            Failed(
                kind="ValueError",
                text="model_name must not contain '@' (got <name>)",
                at="lmcache/v1/distributed/api.py",
            ),
        ),
        sentence="the model is {name}",
        connectors=_MP,
        releases={"lmcache": ">=0.4.4"},
        cause="`@` divides the parts of a key, and the name in it is --model as it was typed (a path of a folder named "
        "after a revision, for example), not --served-model-name. Every lookup and store fails in the server.",
        now="ln -s /models/NAME@REVISION /models/NAME-REVISION and vllm serve /models/NAME-REVISION; a revision of "
        "the Hub: --revision in place of the name",
        good="model paths without `@`",
    ),
)
