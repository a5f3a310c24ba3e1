"""Texts without a line of a log, as reports describe: with each finding of findings/described.py, and nearly."""

from __future__ import annotations

from tests.diagnose.lines import logged

NO_CONNECTOR = "LMCACHE_MAX_LOCAL_CPU_SIZE=30 vllm serve /m/a --max-model-len 32768\nMissing `--kv-transfer-config`\n"


def lookups_of_none() -> str:
    return logged("0.3.10", "asked", "r1", 900, 0, 0, which="%d, need to load")


YAML = 'chunk_size: 256\nlocal_cpu: false\nlocal_disk: "/mnt/kv"\n'
RUNS = {name: logged("0.3.10", "configured", values) for name, values in (
    ("default", "{'chunk_size': 256, 'local_cpu': True, 'local_disk': None, 'remote_url': None}"),
    ("same", "{'chunk_size': 256, 'local_cpu': False, 'local_disk': '/mnt/kv', 'remote_url': None}"),
)}  # fmt: skip

SEEDED = "LMCache 0.3.12, PYTHONHASHSEED=0 on both sides.\n"
HASHED = "".join(f"{side}: tokens_len=256, tokens_preview=(391, 992), hash=-19836226859670{{}}\n" for side in "PD")

HITS = {
    "KVD1348": [YAML + "After a restart the cache is not reused\n", YAML + "restarts: no hits\n" + lookups_of_none()],
    "KVD1330": [YAML + RUNS["default"], YAML.replace("false", "true") + RUNS["default"]],
    "KVD1275": [SEEDED + "The hash values differ between prefill and decode\n", SEEDED + HASHED.format(71, 72)],
    "KVD1314": [NO_CONNECTOR, NO_CONNECTOR.replace("Missing `--kv-transfer-config`", "nothing is cached")],
}
MISSES = [
    ("KVD1275", SEEDED + HASHED.format(71, 71)),
    ("KVD1275", "LMCache: the hash values differ between prefill and decode\n"),
    ("KVD1275", SEEDED.replace("0.3.12", "0.4.1") + HASHED.format(71, 72)),
    ("KVD1330", YAML + RUNS["same"]),
    ("KVD1330", YAML.replace("/mnt/kv", "null").replace("false", "true") + RUNS["default"]),
    ("KVD1330", YAML + YAML.replace("false", "true").replace("/mnt/kv", "null") + RUNS["default"]),
    ("KVD1330", YAML + RUNS["default"] + "RuntimeError: boom\n"),
    ("KVD1330", YAML),
    ("KVD1348", YAML.replace('"/mnt/kv"', "null") + "After a restart the cache is not reused\n"),
    ("KVD1348", YAML + "The cache is not reused\n"),
    ("KVD1348", YAML + "After a restart the cache is there\n"),
    (
        "KVD1314",
        NO_CONNECTOR.replace("--max", """--kv-transfer-config '{"kv_connector":"LMCacheMPConnector"}' --max"""),
    ),
    ("KVD1314", NO_CONNECTOR + "RuntimeError: boom\n"),
    ("KVD1314", "vllm serve /m/a\n"),
]
