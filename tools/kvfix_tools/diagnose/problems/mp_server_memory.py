"""The LMCache server's memory: its L1, locks on chunks, and chunks that are gone."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Died, Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"

PROBLEMS = (
    Problem(
        code="KVD1845",
        name="gpu-memory-read-as-hosts",
        severity=Severity.CRASH,
        title="The server copies KV without its compiled operations, takes GPU memory for the host's, and dies of it.",
        shows=(Died(within="multi_layer_block_kv_transfer"),),
        sentence="a copy of KV blocks in Python ends in a segmentation fault",
        said=(
            r"python_ops_fallback|\btorch_ops\b|mp_mem_kernels|_transfer_per_layer_\w+",
            r"(?i)\bsegfault|\bsigsegv|segmentation fault|exit(?:s|ed)?(?: with)?(?: code)? 139",
        ),
        releases={"lmcache": ">=0.4.7"},
        cause="Without c_ops (cuda_ops from 0.5.4 on) a stand-in in Python copies. It makes a host tensor of each "
        "pointer, and the server's staging buffers lie on the GPU. A whole chunk passes all the same; one of which "
        "vLLM has a part already is copied by the CPU, and the process ends with SIGSEGV.",
        now="python -c 'import torch, lmcache.c_ops' (0.5.4 and newer: lmcache.cuda_ops) in the server's container "
        "shows why it does not load: a wheel of this torch and CUDA; or LMCACHE_MP_TRANSFER_MODE=engine_driven for "
        "vLLM with --supported-transfer-mode auto for the server, which hands over tensors",
        good="compiled operations that load; the stand-in is wrong in each release up to 0.5.6 (pull 4575 is open)",
        sure=False,
        threads=(_LMCACHE + "issues/4155", _LMCACHE + "pull/4575"),
    ),
    Problem(
        code="KVD913",
        name="shared-memory-too-small",
        severity=Severity.SLOW,
        title="/dev/shm is smaller than the server's L1: KV is sent by copying it through messages, slowly.",
        shows=(
            Logged("Insufficient /dev/shm capacity: need <need> bytes, have <have> bytes."),
            Logged("Cannot verify /dev/shm capacity; disabling SHM."),
            Logged("Failed to initialize SHM context (shm_name=<name>), falling back to pickle transport"),
        ),
        cause="Docker gives a container 64 MB of /dev/shm unless told otherwise. With lmcache_driven transfers it does "
        "not matter; engine_driven ones use it for every chunk.",
        now="docker --shm-size=60g (more than --l1-size-gb) or --ipc host for server and vLLM; Kubernetes: an emptyDir "
        "with medium: Memory at /dev/shm; restart both",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD938",
        name="server-locks-run-out",
        severity=Severity.WRONG,
        title="A load ended after its chunks' read locks had run out: they may have been replaced while it read.",
        shows=(
            Logged("L1Manager: finish read on non-existing key <key>, potential inconsistent data might be read"),
            Logged("L1Manager: finish read on non-read-locked key <key>, potential inconsistent data might be read"),
            Logged("L1Manager: finish write on non-write-locked key <key>, potential inconsistent data"),
            Logged("L1Manager: finish read on write-locked key <key>, potential inconsistent data might be read"),
            Logged("L1Manager: finish write on read-locked key <key>, potential inconsistent data might be written"),
            Logged("whose write reservation expired, potential inconsistent data might be written"),
            Logged("L1Manager: write reservation on key <key> (tag <tag>) expired; handing the buffer to a new writer"),
        ),
        releases={"lmcache": ">=0.3.14"},
        cause="A lookup locks chunks for --l1-read-ttl-seconds (300), a store for --l1-write-ttl-seconds (600); the "
        "request waited longer in vLLM's queue, the store (or load from L2) took longer, or the locks were released "
        "twice. Once in a while after an abort it is harmless.",
        now="--l1-read-ttl-seconds 1800 (for writes --l1-write-ttl-seconds 1800) and a larger --l1-size-gb for the "
        "server, fewer waiting requests; restart the server, then vLLM",
        good="kvfix run -- CMD for what releases locks wrongly (KVF105, KVF114, KVF116); no release is right in all of "
        "it",
        sure=False,
    ),
    Problem(
        code="KVD699",
        name="pickled-store-is-empty",
        severity=Severity.SLOW,
        title="A client sends no KV with its stores: it believes in shared memory that the server does not have.",
        shows=(Failed(kind="EOFError", text="Ran out of input", within="server_transfer.py:commit_store"),),
        sentence="a store came without its data",
        releases={"lmcache": ">=0.4.7"},
        sure=False,
        cause="With engine_driven transfers the client writes into the server's shared memory, or sends pickled KV "
        "where there is none. --l1-use-lazy, the default, silently leaves out the memory of --shm-name. Known of "
        "`lmcache bench server --mode cpu`, and of a server that was restarted with other options than before.",
        now="--no-l1-use-lazy with --shm-name for the server (/dev/shm larger than --l1-size-gb), or no --shm-name at "
        "all; restart the server, then its clients",
        good="the same: no release up to 0.5.6 refuses the two options together",
        threads=(_LMCACHE + "issues/4811", _LMCACHE + "pull/4812"),
    ),
    Problem(
        code="KVD939",
        name="prefetched-chunk-gone",
        severity=Severity.SLOW,
        title="A chunk that the lookup promised is not in the server's L1 any more: the load fails.",
        shows=(Logged("Failed to read prefetched object <key> from L1 storage: <reason>"),),
        sentence="the server cannot read a chunk that it had promised: {reason}",
        said=(
            r"(?i)lmcache",
            r"Some keys not found during retrieve|(?i:retriev\w+[^\n]{0,30}(?:=|resolves|returns) ?`?false)",
            r"(?i)degenerat|garbage|gibberish|garbled|\bNaN\b|wrong|corrupt|nonsens|fail",
        ),
        releases={"lmcache": ">=0.3.14"},
        cause="It was evicted after its read lock ran out (--l1-read-ttl-seconds, 300), or another request is writing "
        "the same key. Before LMCache 0.5.5 the client takes the failed load for done: wrong text (KVD301).",
        now="a larger --l1-size-gb, --l1-read-ttl-seconds 1800, fewer waiting requests; restart the server, then vLLM",
        good="LMCache 0.5.5 or newer computes such requests again",
        threads=(_LMCACHE + "issues/3388",),
    ),
)
