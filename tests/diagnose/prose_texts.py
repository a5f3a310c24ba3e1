"""Texts, as people ask for help: what findings/prose.py has to see, and what not."""

from __future__ import annotations

YAML = "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: {}\n"
POD = '- name: LMCACHE_MAX_LOCAL_CPU_SIZE\n  value: "{}"\n'
SERVER = """lmcache server --l2-adapter '{{"type": "fs_native", "base_path": "/kv"{}}}'\n"""

HITS = {
    "KVD1200": [
        "vLLM with LMCache fails to start:\n" + YAML.format(300) + "vllm serve m --tensor-parallel-size 4\n",
        "There appear to be 5 leaked shared_memory objects\nvllm serve m -tp 8, with lmcache\n" + POD.format(64),
        "lmcacheConfig: CrashLoopBackOff\ncpuOffloadingBufferSize: \"60\"\ntensorParallelSize: 2\n",
        "LMCache: vLLM\u5185\u5b58\u4e0d\u8db3\u88abkill\n" + YAML.format(300),
    ],
    "KVD1202": [
        "With LMCache the second answer is gibberish.\n",
        "LMCache: garbled output\nremote_serde: cachegen\n",
        "LMCache: my model answers differently on a hit\n",
        "Under load answers get degraded with LMCache.\n",
        "Accuracy issue for Prefill-Decode Disaggregation\n",
        "Abnormal inference result with Mooncake\n",
    ],
    "KVD1204": [
        "LMCache: requests get stuck after an hour.\n",
        "kv_connector LMCacheConnectorV1 deadlocks\n",
        "The inference with LMCache was stucked.\n",
        "The decode instance waits forever with LMCache.\n",
        # A title that names a level is no line of a log.
        "# nixl connector PD disagg stuck at INFO logging level\n",
        "Prefill/decode disaggregation hangs\n",
    ],
    "KVD1206": [
        "LMCache never gets hits.\nremote_url: redis://h:6379\n",
        "LMCache hit rate is always 0%\n",
        "LMCache is on, and the hit rate stays 0. What is wrong?\n",
        "LMCache cannot load KV from the store.\n",
        "The same prompt again, and LMCache doesn't find anything.\n",
        "The prompts are not reused by lmcache.\nremote_serde: cachegen\n",
        "LMCache: hit is 0 with my model\n",
        "The cache is not effective with LMCache, all is recalculated every time.\n",
    ],
    "KVD1208": ["Host memory keeps growing with LMCache.\n", "memory leak in lmcache\n",
                "RAM usage rises until the node dies with LMCache.\n", "LMCache with tp 8 uses 400 GB, why?\n"],
    "KVD1210": ["With LMCache TTFT is the same as without.\n", "With LMCache TTFT went from 400 ms to 3 s\n",
                "TTFT went from 0.4 s to 3 s with LMCache\n", "LMCache: TTFT dropped by 2% only\n",
                "LMCache is slower than vLLM alone\n" + YAML.format(5),
                "\u4f7f\u7528LMCache\u540eTTFT\u6ca1\u6709\u4e0b\u964d\n",
                # One engine with a seed and no store: the keys are the same.
                "LMCache: hit tokens: 0, TTFT as before\nPYTHONHASHSEED=0 vllm serve m\n" + YAML.format(60)],
    "KVD1212": ["LMCache fills the disk: files are not deleted.\n", "The SSD grows past its limit, fs_native\n"],
}  # fmt: skip

MISSES = [
    # A small buffer; no word of a death; and no KV connector.
    ("KVD1200", "LMCache fails to start:\n" + YAML.format(5)),
    ("KVD1200", "How large should this be for LMCache?\n" + YAML.format(300)),
    ("KVD1200", "My database fails to start\n" + POD.format(64).replace("LMCACHE_", "")),
    ("KVD1202", "The output of my printer is gibberish.\n"),
    ("KVD1202", "LMCache gives the same answer.\n"),
    ("KVD1204", "Scheduler deadlocks without KV-cache connector\n"),
    ("KVD1204", "It hangs. I use no KV-cache offloading connector.\n"),
    ("KVD1204", "I am stuck with the set-up of LMCache.\n"),
    # What is said in passing, far below.
    ("KVD1204", "A wish for LMCache.\n" + 60 * "It is about tests. " + "They hang.\n"),
    ("KVD1206", "LMCache hit rate is 80%\n"),
    ("KVD1206", "LMCache hit rate is always 0 with LMCacheMPConnector\n"),
    ("KVD1206", "LMCache hit tokens: 0, TTFT as before\nPYTHONHASHSEED=0\n"),
    ("KVD1206", "LMCache hit rate is 0.85 with 10 requests\n"),
    ("KVD1208", "LMCache wants more memory settings.\n"),
    ("KVD1210", "Which models does LMCache support?\n"),
    ("KVD1210", "TTFT of my proxy is high\n"),
    # What only praises.
    ("KVD1210", "LMCache is great: TTFT went from 3 s to 0.4 s\n"),
    ("KVD1210", "LMCache: TTFT went from 900 to 85 ms. Thank you!\n"),
    ("KVD1210", "With LMCache our TTFT dropped by 70%.\n"),
    ("KVD1210", "TTFT is high with kv_connector NixlConnector\n"),
    ("KVD1212", "LMCache on a disk: how is it set?\n"),
    # A line of a log is there: it says what is wrong.
    ("KVD1210", "LMCache is slower\nOOM command not allowed when used memory > 'maxmemory'\n"),
]
