"""LoRA adapters share KV through the multi-process server: the name of the adapter is not in the cache key.

Symptom: No error is logged. With `--enable-lora`, a prompt gets KV that another adapter or the base model has cached.

Cause: The cache key consists of the model, the tokens and `cache_salt` (lmcache_mp_metadata.py 0.5.6:91). The LoRA
adapter changes the KV, but is not in the key. The hashes of vLLM's own prefix cache include the adapter's name.

Fix: If a request has a LoRA adapter, the fix adds a hash of the adapter's name to LMCache's copy of `cache_salt`.

Mixed roll-out: Install the fix on all engines that share a server, or on none of them. The server does not need the
fix. For requests with a LoRA adapter, an engine with the fix does not find the chunks of an engine without the fix.
An engine without the fix still shares KV between adapters. If a server has a quota for each `cache_salt`, each adapter
gets its own quota. Requests without a LoRA adapter keep their keys.
- Releases: LMCache 0.4.5 to 0.5.6 (lmcache_mp_connector_0201: to 0.5.5). vLLM's own connector: vLLM 0.11.2 to 0.33.0.
- Upstream: https://github.com/LMCache/LMCache/issues/2961, https://github.com/vllm-project/vllm/issues/44250 (open).
- Remove when: The adapter is in the key.
"""

import hashlib

from kvfix.fixes.api import LMCACHE_MP, LMCACHE_MP_0201, VLLM_MP, Any, Fix, Owner, fix_after, note, stubs


def _own_salt(tracker: Any, answer: None, request: Any, *_: Any, **__: Any) -> None:
    """Set a salt that no other request has. So no other request shares chunks with this request."""
    tracker.cache_salt = f"kvfix-{request.request_id}"
    return answer


@fix_after(on_fault=_own_salt)
def fix(tracker: Any, answer: None, request: Any) -> None:
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        note(__name__, f"request {request.request_id} has a LoRA adapter")
        # The hash is the same on every host, and its characters are safe in file names and keys.
        name = hashlib.sha256(lora.lora_name.encode()).hexdigest()[:16]
        tracker.cache_salt = f"{request.cache_salt or ''}+lora-{name}"


def shows_bug(hook: Any, module: Any) -> bool:
    """Make a tracker with an adapter, and a tracker without one. With the bug, both trackers have the same salt."""
    salts = []
    for lora in (None, stubs.Stub(lora_name=stubs.NAME)):
        tracker = module.LMCacheMPRequestTracker.__new__(module.LMCacheMPRequestTracker)
        hook(tracker, stubs.request(2048, cache_salt="tenant", lora_request=lora))
        salts.append(tracker.cache_salt)
    return bool(salts[0] == salts[1])


FIX = Fix(
    *(
        Owner(dist, module, "LMCacheMPRequestTracker", copy=module).target(
            "__init__", broken=broken, probe=shows_bug, fix=fix
        )
        for dist, module, broken in (
            ("lmcache", LMCACHE_MP.module, ">=0.4.5,<=0.5.3"),
            ("lmcache", "lmcache.integration.vllm.lmcache_mp_metadata", ">=0.5.4,<=0.5.6"),
            ("lmcache", LMCACHE_MP_0201.module, ">=0.4.5"),
            ("vllm", VLLM_MP.module, ">=0.11.2"),
        )
    ),
    effect="wrong output",
    scenarios=("mp-lora-not-in-key", "mp-lora-not-in-key-in-tree"),
    opt_in=True,
)
