"""L2 stores of the LMCache server by a native or a remote client: S3, Valkey, Redis, NIXL, a peer."""

from __future__ import annotations

from kvfix_tools.diagnose.findings import Severity
from kvfix_tools.diagnose.problems import Failed, Logged, Problem

_LMCACHE = "https://github.com/LMCache/LMCache/"
_L2 = "lmcache/v1/distributed/l2_adapters"
_FS, _S3, _VALKEY = f"{_L2}/fs_l2_adapter.py", f"{_L2}/s3_l2_adapter.py", f"{_L2}/valkey_l2_adapter.py"

PROBLEMS = (
    Problem(
        code="KVD929",
        name="l2-s3-fails",
        severity=Severity.SLOW,
        title="The server's S3 adapter cannot write or read.",
        shows=(
            Failed(kind="RuntimeError", text="S3 GET failed for <key>:", at=_S3),
            Failed(kind="RuntimeError", text="S3 PUT failed for <key>:", at=_S3),
            Logged("S3L2Adapter failed to launch", _S3),
        ),
        releases={"lmcache": ">=0.4.5"},
        cause="The status or error after the key decides: 403 rights or credentials, 301 region, 404 bucket, "
        "connection errors the address.",
        now='"s3_endpoint": "BUCKET.s3.REGION.amazonaws.com", "s3_region": "REGION" and credentials in the adapter\'s '
        "JSON (or in the environment), and restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD930",
        name="l2-s3-without-credentials",
        severity=Severity.CRASH,
        title="The server's S3 adapter has no credentials, and the server does not start.",
        shows=(
            Failed(kind="RuntimeError", text="S3L2Adapter: boto3 found no credentials in the environment", at=_S3),
            Failed(kind="ImportError", text="S3L2Adapter requires boto3 to resolve credentials", at=_S3),
        ),
        sentence="no credentials for S3",
        releases={"lmcache": ">=0.4.5"},
        cause="Without aws_access_key_id and aws_secret_access_key in the JSON the adapter asks boto3, which finds "
        "none or is not installed.",
        now="export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... for the server, and pip install boto3",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD931",
        name="l2-valkey-fails",
        severity=Severity.SLOW,
        title="The server's Valkey adapter fails at keys: they are not stored, or count as missing.",
        shows=(
            Logged("Valkey SET failed (batch task_id=<task>, key idx=<index>): ", _VALKEY),
            Logged("Valkey GET failed (batch=<batch>, idx=<index>): ", _VALKEY),
            Logged("Valkey EXISTS failed (batch=<batch>, idx=<index>): ", _VALKEY),
            Logged("dispatch failed after <done>/<all> keys (task_id=<task>): ", _VALKEY),
            Logged("Valkey GET unexpected error (batch=<batch>, idx=<index>): ", _VALKEY),
            Logged("Valkey EXISTS unexpected error (batch=<batch>, idx=<index>): ", _VALKEY),
        ),
        releases={"lmcache": ">=0.5.2"},
        cause="The error at the end decides: request_timeout too short for chunks of several MB, the server's "
        "maxmemory with noeviction, cluster_mode set wrongly, or the connection lost.",
        now='"request_timeout": 10 in the adapter\'s JSON, valkey-cli config set maxmemory-policy allkeys-lru, '
        '"cluster_mode" as the server is; restart the LMCache server',
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD932",
        name="l2-extension-missing",
        severity=Severity.CRASH,
        title="An L2 adapter needs a compiled extension that this installation of LMCache does not have.",
        shows=(
            Failed(kind="RuntimeError", text="L2 adapter requires the C++ <name> extension."),
            Logged("L2 adapter requires the C++ <name> extension."),
        ),
        sentence="the {name} extension is not built",
        releases={"lmcache": ">=0.4.2"},
        cause="The resp, fs_native and mooncake_store adapters are C++; PyPI's wheel has not all of them (Mooncake's "
        "is built from source only).",
        now='"type": "fs" in place of fs_native, "type": "valkey" in place of resp; for Mooncake build LMCache with '
        "MOONCAKE_INCLUDE_DIR=... pip install -e .",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD934",
        name="l2-nixl-full-or-broken",
        severity=Severity.SLOW,
        title="The server's NIXL store cannot take or give chunks.",
        shows=(
            Logged("NIXL store task <task> failed", f"{_L2}/nixl_store_l2_adapter.py"),
            Logged("NIXL load task <task> failed", f"{_L2}/nixl_store_l2_adapter.py"),
            Logged("Dynamic NIXL store task <task> failed"),
            Logged("Dynamic NIXL load task <task> failed"),
            Logged("Dynamic NIXL store failed for key <key>: "),
            Logged("Dynamic NIXL load failed for key <key>: "),
            Logged("Storage capacity exceeded, skipping store for key"),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="The traceback or the error at the end decides: `Insufficient NIXL storage capacity` or `Storage "
        "capacity exceeded`: pool_size or max_capacity_gb is used up; else NIXL's backend refuses path or credentials.",
        now="a larger pool_size (or max_capacity_gb in backend_params), with an eviction block, and restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
        sure=False,
    ),
    Problem(
        code="KVD935",
        name="l2-native-timeout",
        severity=Severity.HANG,
        title="A native L2 adapter (resp, fs_native, Mooncake) does not complete its operations.",
        shows=(
            Logged("delete() timed out after 30s for <count> keys"),
            Logged("drain_completions failed"),
        ),
        cause="The store behind it hangs (a dead mount, a server that does not answer). Requests whose prefetch waits "
        "for it wait as well: no release has a deadline for L2.",
        now="look at the mount or the server of --l2-adapter; restart the LMCache server without that adapter",
        good="no release of LMCache has a deadline for L2 loads yet (0.5.6; pull request 5255 is open)",
        sure=False,
        threads=(_LMCACHE + "issues/4945",),
    ),
    Problem(
        code="KVD936",
        name="peer-does-not-answer",
        severity=Severity.SLOW,
        title="A peer's LMCache server does not answer in time: its chunks count as missing.",
        shows=(
            Logged("P2P lookup submit to <peer> timed out; treating as a miss", f"{_L2}/p2p_l2_adapter.py"),
            Logged("P2P lookup task <task> timed out; treating as a miss", f"{_L2}/p2p_l2_adapter.py"),
            Logged("P2P load task <task> timed out; treating as a failure", f"{_L2}/p2p_l2_adapter.py"),
            Logged("P2P load task <task> has a missing/invalid remote address; treating as a failure"),
        ),
        releases={"lmcache": ">=0.5.0"},
        cause="The peer is not reachable at --p2p-advertise-url, or its handler failed (its own log). `No GPU context "
        "found for model` there: an MLA model, whose world size is 1 in the question.",
        now="curl or nc to the peer's port from this server's container; read the peer's log of the same second",
        good="for MLA models LMCache 0.5.5 or newer on both sides (0.5.4 is not right); else a change of network",
        sure=False,
        threads=(_LMCACHE + "issues/4894",),
    ),
    Problem(
        code="KVD1616",
        name="l2-s3-cannot-list-or-delete",
        severity=Severity.LEAK,
        title="The server's S3 adapter cannot delete or list: its bucket grows.",
        shows=(
            Failed(kind="RuntimeError", text="S3 DELETE failed for <key>:", at=_S3),
            Failed(kind="RuntimeError", text="S3 ListObjectsV2 failed:"),
            Logged("S3L2Adapter DELETE failed for <key>: <error>", _S3),
            Logged("S3L2Adapter delete failed: <error>", _S3),
        ),
        sentence="S3 refuses to delete or list",
        releases={"lmcache": ">=0.4.5"},
        cause="The number at the end: 403: the rights of the key have no s3:DeleteObject or s3:ListBucket (the second "
        "is on the bucket, not on its objects); 404: no such bucket; 5xx: the store. Writing and reading may go on.",
        now="add s3:DeleteObject on arn:aws:s3:::BUCKET/* and s3:ListBucket on arn:aws:s3:::BUCKET to the policy; aws "
        "s3 rm and aws s3 ls with the same key show it",
        good="a key with s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket",
        sure=False,
    ),
    Problem(
        code="KVD1618",
        name="l2-s3-disabled-itself",
        severity=Severity.SLOW,
        title="The server's S3 adapter has switched itself off after failures of its connection.",
        shows=(Failed(kind="RuntimeError", text="S3 connection disabled (circuit-broken); listing unavailable"),),
        sentence="the S3 adapter is off until the server is restarted",
        releases={"lmcache": ">=0.5.0"},
        cause="After a number of failures in a row (`S3L2Adapter disabled after`) it asks S3 no more, also where the "
        "connection is back: nothing is stored in or found in L2.",
        now="curl -sI the endpoint from the server's container; then restart the LMCache server",
        good="no release up to 0.5.6 tries again by itself",
    ),
    Problem(
        code="KVD1620",
        name="l2-s3-settings-refused",
        severity=Severity.CRASH,
        title="The server refuses the settings of its S3 L2: the message names the key.",
        shows=(Failed(kind="ValueError", within="s3_l2_adapter.py:from_dict"),),
        releases={"lmcache": ">=0.4.5"},
        cause="s3_endpoint (host of the bucket) and s3_region are needed. In JSON numbers and true or false stand "
        "without quotes.",
        now='--l2-adapter \'{"type": "s3", "s3_endpoint": "BUCKET.s3.us-east-1.amazonaws.com", "s3_region": '
        '"us-east-1", "max_capacity_gb": 500, "disable_tls": false}\'; restart the server',
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1622",
        name="l2-valkey-settings-refused",
        severity=Severity.CRASH,
        title="The server refuses the settings of its Valkey L2: the message names the key.",
        shows=(
            Failed(kind="ValueError", within="valkey_l2_adapter.py:from_dict"),
            Failed(kind="ValueError", within="valkey_l2_adapter.py:_parse_startup_nodes"),
            Failed(kind="ValueError", within="valkey_l2_adapter.py:__init__"),
        ),
        releases={"lmcache": ">=0.5.2"},
        cause="startup_nodes is one text of host:port, with commas between; numbers stand without quotes; key_prefix "
        "has no `@`; a ttl_seconds of 0 is refused: leave it out for keys that do not expire.",
        now='--l2-adapter \'{"type": "valkey", "startup_nodes": "valkey:6379", "num_workers": 8, "max_capacity_gb": '
        "200}'; restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1624",
        name="l2-files-settings-refused",
        severity=Severity.CRASH,
        title="The server refuses the settings of its L2 on files: the message names the key.",
        shows=(
            Failed(kind="ValueError", within="fs_l2_adapter.py:from_dict"),
            Failed(kind="ValueError", within="fs_native_l2_adapter.py:from_dict"),
        ),
        releases={"lmcache": ">=0.4.3"},
        cause="base_path is needed; relative_tmp_dir is a text, below base_path; use_odirect is true or false and the "
        "numbers are whole and above 0, all without quotes.",
        now='--l2-adapter \'{"type": "fs", "base_path": "/mnt/nvme/kv", "relative_tmp_dir": "tmp", "use_odirect": '
        "false}'; restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
    Problem(
        code="KVD1626",
        name="l2-nixl-json-refused",
        severity=Severity.CRASH,
        title="The server refuses the JSON of its NIXL L2: the message names the key.",
        shows=(
            Failed(kind="ValueError", within="nixl_store_l2_adapter.py:from_dict"),
            Failed(kind="ValueError", within="nixl_store_dynamic_l2_adapter.py:from_dict"),
            Failed(kind="ValueError", within="nixl_native_l2_adapter.py:from_dict"),
            Failed(kind="ValueError", text="backend_params must include a positive 'max_capacity_gb'"),
        ),
        releases={"lmcache": ">=0.4.2"},
        cause="backend names a NIXL plugin in capitals. All values in backend_params are texts, in quotes, also "
        "numbers and true or false; pool_size (nixl_store) stands outside of it, without. nixl_store_dynamic wants "
        "max_capacity_gb in backend_params.",
        now='--l2-adapter \'{"type": "nixl_store", "backend": "POSIX", "pool_size": 1024, "backend_params": '
        '{"file_path": "/mnt/kv", "use_direct_io": "false"}}\'; for nixl_store_dynamic "max_capacity_gb": "500" in '
        "backend_params; restart the server",
        good="keep it so: the set-up was wrong, and no release changes that",
    ),
)
