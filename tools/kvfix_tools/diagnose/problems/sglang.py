"""LMCache in SGLang's own process (`--enable-lmcache`): releases that do not go together."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE, _SGLANG = "https://github.com/LMCache/LMCache/", "https://github.com/sgl-project/sglang/"

_MP = "lmcache/integration/sglang/multi_process_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD411",
        name="sglang-newer-than-lmcache",
        severity=Severity.CRASH,
        title="SGLang hands LMCache's connector an argument that this LMCache does not know.",
        shows=(
            Failed(kind="TypeError", text="LMCacheLayerwiseConnector.__init__() got an unexpected keyword argument"),
            Failed(kind="TypeError", text="LMCacheConnector.__init__() got an unexpected keyword argument 'tp_group'"),
        ),
        cause="SGLang 0.5.2 and newer give tp_group; LMCache 0.3.9 and newer take it.",
        now="pip install --upgrade --no-deps lmcache==0.3.9.post2 (or newer, of this torch and CUDA), and restart",
        good="LMCache 0.3.9 or newer with SGLang 0.5.2 or newer",
        threads=(_LMCACHE + "issues/1589",),
    ),
    Problem(
        code="KVD412",
        name="sglang-group-without-allreduce",
        severity=Severity.CRASH,
        title="SGLang gives LMCache its own kind of process group, and the first load of several ranks fails.",
        shows=(
            Failed(kind="AttributeError", text="'GroupCoordinator' object has no attribute 'allreduce'"),
            Failed(kind="AttributeError", text="'GroupCoordinator' object has no attribute 'all_reduce'"),
        ),
        cause="LMCache calls torch.distributed.all_reduce with the tp_group that it gets; SGLang before pull request "
        "12946 (November 2025) gives its GroupCoordinator, which torch does not take.",
        now="--tp 1, or without --enable-lmcache; or an SGLang from December 2025 or later (0.5.6)",
        good="SGLang with pull request 12946, which hands over the coordinator's device_group",
        threads=(_SGLANG + "pull/12946", _LMCACHE + "issues/1589"),
    ),
    Problem(
        code="KVD413",
        name="sglang-frees-twice",
        severity=Severity.CRASH,
        title="SGLang's LMCache cache frees a request's KV that SGLang has freed already, and the scheduler dies.",
        shows=(Failed(kind="AssertionError", text="Committed KV cache already freed"),),
        sentence="the request's KV was taken twice",
        cause="SGLang's main branch of November 2025 (0.5.5.post3) took a request's KV by pop_committed_kv_cache once "
        "in LMCRadixCache and once in its base class; the second time asserts.",
        now="pip install 'sglang>=0.5.6', or without --enable-lmcache",
        good="SGLang with pull request 14005 (merged on 1 December 2025)",
        threads=(_SGLANG + "issues/13801", _SGLANG + "pull/14005", _LMCACHE + "issues/2084"),
    ),
    Problem(
        code="KVD436",
        name="sglang-mla-without-two-buffers",
        severity=Severity.CRASH,
        title="SGLang's LMCache cache takes two buffers of KV for granted, and an MLA model has one.",
        shows=(
            Failed(kind="AttributeError", text="'MLATokenToKVPool' object has no attribute '<what>'"),
            Failed(kind="AttributeError", text="'MLATokenToKVPoolFP4' object has no attribute '<what>'"),
        ),
        sentence="the pool of an MLA model has no {what}",
        cause="LMCRadixCache hands k_buffer and v_buffer of the pool to LMCache; the pool of an MLA model (DeepSeek, "
        "Kimi, GLM) has one kv_buffer.",
        now="serve the MLA model without --enable-lmcache (--enable-hierarchical-cache of SGLang's own takes it)",
        good="none is merged yet (September 2026): pull requests 35230 and 35893 of SGLang are open, 20694 and 24549 "
        "were closed",
        threads=(_LMCACHE + "issues/2636", _LMCACHE + "issues/3192", _SGLANG + "pull/24549", _SGLANG + "pull/35893"),
    ),
    Problem(
        code="KVD365",
        name="sglang-without-lmcache-config-file",
        severity=Severity.CRASH,
        title="SGLang takes LMCache as a server of its own now, and was not told where it is.",
        shows=(Failed(kind="ValueError", text="MP mode requires --lmcache-config-file"),),
        cause="SGLang's LMCRadixCache is in multi-process mode by default: it wants a YAML file with mp_host and "
        "mp_port, and a running `lmcache server`. LMCACHE_CONFIG_FILE with chunk_size and local_cpu was the mode "
        "before.",
        now="lmcache server --l1-size-gb 20 --port 5555, then --enable-lmcache --lmcache-config-file FILE with the "
        "lines `mp_host: HOST` and `mp_port: 5555`",
        good="this set-up; no release of SGLang goes back to the variable",
        threads=(_LMCACHE + "issues/4006",),
    ),
    Problem(
        code="KVD486",
        name="sglang-server-refuses",
        severity=Severity.CRASH,
        title="SGLang's load or store was refused by the LMCache server, or took too long.",
        shows=(
            Failed(kind="RuntimeError", text="LMCache MP store failed", at=_MP),
            Failed(kind="RuntimeError", text="LMCache MP retrieve failed for request_id=<request>", at=_MP),
            Failed(text="Timed out waiting for LMCache prefetch to finish", at=_MP),
            Logged("LMCache retrieve failed for <request>"),
            Logged("LMCache store failed for <request>"),
            Logged("LMCache lookup completion failed for <request>"),
        ),
        releases={"lmcache": ">=0.4.6"},
        sure=False,
        cause="The server's log has the reason: the worker is not registered (the server was restarted), L1 is full of "
        "chunks that are in use, or its L2 does not answer (a prefetch that never ends).",
        now="the server's log at this time; restart SGLang after a restart of the server; a larger --l1-size-gb",
        good="what the server's log names; the server started before SGLang, of the same release of LMCache",
    ),
    Problem(
        code="KVD487",
        name="sglang-pages-not-whole",
        severity=Severity.CRASH,
        title="SGLang hands LMCache slots that are no whole pages.",
        shows=(
            Failed(kind="ValueError", text="Slot mapping does not start on page boundaries", at=_MP),
            Failed(kind="ValueError", text="Slot mapping must cover full contiguous pages in MP mode", at=_MP),
        ),
        releases={"lmcache": ">=0.4.6"},
        cause="In MP mode KV is moved in pages of SGLang's --page-size, and chunk_size must be a multiple of it.",
        now="--page-size 64 (or another one above 1) and the server's --chunk-size a multiple of it: 256; restart both",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD488",
        name="sglang-store-fails",
        severity=Severity.SLOW,
        title="LMCache could not store a request's KV of SGLang.",
        shows=(
            Logged("LMCache store_kv failed: <error>"),
            Logged("store_layer generator stopped prematurely before layer loop"),
            Logged("store_layer generator stopped at layer"),
        ),
        releases={"lmcache": ">=0.5.0"},
        quotes=True,
        sure=False,
        cause="`generator stopped`: no memory for the chunks (the CPU pool is full or pinned), so that nothing is "
        "stored; else what the error says. SGLang answers the request all the same.",
        now="a larger max_local_cpu_size in the LMCache configuration; what the error names",
        good="a pool of twice what the prompts that run at once need",
    ),
)
