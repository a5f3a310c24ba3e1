"""The worker blocks for 300 seconds and dies: worker and server use different transfer modes, and neither reports it.

Symptom: The worker blocks for `mq_timeout` and dies. The server does not reply, and logs `No handler registered for
operation ...` (0.5.6, with `Available handlers: [...]`), or `No handler registered for request type ...`.

Cause: The LMCache server has handlers for one mode only (`--supported-transfer-mode`). The worker's mode comes from
`lmcache.mp.mp_transfer_mode`, LMCACHE_MP_TRANSFER_MODE or the device. The server does not reply to a request that it
has no handler for. Worker and server are separate processes, so kvfix cannot set the options of both.

Workaround: Start `lmcache server` with `--supported-transfer-mode auto`, or set LMCACHE_MP_TRANSFER_MODE of the worker
to the mode of the server. The server logs its mode: `Supported transfer mode: ...`.
- Upstream: https://github.com/LMCache/LMCache/issues/4186 (open), https://github.com/LMCache/LMCache/pull/4194.
- Remove when: The server replies to a request that it has no handler for.
"""

import os

from kvfix.fixes.api import MP_WORKER_ADAPTER, Fix


def harmless() -> str:
    """Return a text if the environment of this process sets the transfer mode, else ""."""
    mode = os.environ.get("LMCACHE_MP_TRANSFER_MODE", "")
    return f"LMCACHE_MP_TRANSFER_MODE={mode} is set here; the server must have the same mode" if mode else ""


FIX = Fix(
    MP_WORKER_ADAPTER._send_register_kv_caches_request(broken=">=0.4.7", fix=None),
    effect="hang",
    evidence={"KVD206": ""},
    no_patch={"lmcache": "to answer unknown requests, the server needs a new protocol, not a new function"},
    harmless=harmless,
)
