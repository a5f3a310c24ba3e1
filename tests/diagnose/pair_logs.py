"""Logs of a prefill and a decode engine in one: decode lost its peer, which died of what is not known, and nearly."""

from __future__ import annotations

from tests.diagnose.releases import CORE

MADE = "(EngineCore_DP0 pid=7) INFO 05-01 15:00:01 [factory.py:62] Creating v1 connector with name: NixlConnector and "
NIXL = "/opt/app/vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"


def died(error: str = "AssertionError", source: str = "assert rows == 7", function: str = "schedule") -> str:
    """A traceback of an engine that ends of it."""
    lines = ["EngineCore encountered a fatal error.", "Traceback (most recent call last):"]
    lines += [f'  File "/opt/app/vllm/v1/core/any.py", line 7, in {function}', f"    {source}", error]
    return "".join(f"{CORE}{line}\n" for line in lines)


def lost() -> str:
    lines = ["Traceback (most recent call last):", f'  File "{NIXL}", line 7, in _pop_done_transfers']
    lines += ["    state = check(handle)", "nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"]
    return "".join(f"{CORE}{line}\n" for line in lines)


PODS = [("kubectl logs decode-0\n", "kubectl logs prefill-0 --previous\n"), ("", "")]
TWO = [f"{MADE}engine_id: c92321f8-5be9\n", f"{MADE}engine_id: b6b76ae8-5a6c\n"]
SAME = [f"{MADE}engine_id: c92321f8-5be9_dp0\n", f"{MADE}engine_id: c92321f8-5be9_dp1\n"]


def prefixed(text: str, pod: str) -> str:
    return "".join(f"{pod}{line}\n" for line in text.splitlines())


#: KVD109.
KNOWN = ("AssertionError", "assert req_id in self.requests", "_update_from_kv_xfer_finished")

HITS = {
    "KVD1380": [
        PODS[0][0] + lost() + PODS[0][1] + died(),
        TWO[0] + lost() + TWO[1] + died(),
        TWO[1] + died() + TWO[0] + lost(),
        prefixed(lost(), "[pod/decode-0/vllm] ") + prefixed(died(), "[pod/prefill-0/vllm] "),
        prefixed(lost(), "pd-decode-6c8f9c4df6-vh88z vllm ") + prefixed(died(), "pd-prefill-6c8f9c4df6-aaaaa vllm "),
    ]
}
MISSES = [
    # One engine, of one rank and of two; a death that is known; a failure that is survived; and no peer that is lost.
    ("KVD1380", lost() + died()),
    ("KVD1380", SAME[0] + SAME[1] + lost() + died()),
    ("KVD1380", prefixed(lost() + died(), "[pod/decode-0/vllm] ")),
    ("KVD1380", TWO[0] + lost() + TWO[1] + died(*KNOWN)),
    ("KVD1380", TWO[0] + lost() + TWO[1] + died().partition("\n")[2]),
    ("KVD1380", TWO[0] + TWO[1] + died()),
]
