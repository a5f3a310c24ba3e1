"""Worker and server of the multi-process cache were started for different transfer modes, and neither says so.

## Symptom
The worker does not start: it blocks for 300 seconds (`mq_timeout`) and dies. The server has logged `No handler
registered for operation ...` (0.5.6, with `Available handlers: [...]`), or `No handler registered for request type
...`, and has answered nothing.

## Cause
The server loads the handlers of one mode (`--supported-transfer-mode`); the worker chooses its own by its device, or by
`lmcache.mp.mp_transfer_mode` or LMCACHE_MP_TRANSFER_MODE. A request without a handler gets no reply. The other half is
in another process, perhaps on another machine: what it was started with cannot be seen, or changed, from here.

## Workaround
Start `lmcache server` with `--supported-transfer-mode auto`, or set LMCACHE_MP_TRANSFER_MODE of the worker to the mode
of the server (its log says `Supported transfer mode: ...`). Where both are set alike this does no harm.

## Releases
LMCache 0.4.7 to 0.5.6.

## Upstream
https://github.com/LMCache/LMCache/issues/4186 is open, https://github.com/LMCache/LMCache/pull/4194

## Remove when
The server answers a request that it has no handler for.
"""

from __future__ import annotations

import os

from kvfix import probe
from kvfix.fix import Fix, Patch


def harmless() -> str:
    """Somebody has chosen."""
    mode = os.environ.get("LMCACHE_MP_TRANSFER_MODE", "")
    return f"LMCACHE_MP_TRANSFER_MODE={mode} is set here; it must be the server's too" if mode else ""


FIX = Fix(
    __name__,
    __doc__,
    patches=(
        Patch(
            dist="lmcache",
            module="lmcache.integration.vllm.vllm_multi_process_adapter",
            function="LMCacheMPWorkerAdapter._send_register_kv_caches_request",
            broken=">=0.4.7",
            shows_bug=probe.cannot_tell,
            correct=None,
        ),
    ),
    harmless=harmless,
)
