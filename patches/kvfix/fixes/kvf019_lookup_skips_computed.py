"""What vLLM has in its prefix cache counts as found in LMCache, and is promised when vLLM has it no more.

## Symptom
`Num retrieved tokens: 0, num expected tokens: ...`, a load that comes short; with kv_load_failure_policy "fail" the
request ends with an error. And chunks that are never stored: no hit of a prompt goes beyond them.

## Cause
The lookup leaves out the chunks that vLLM has computed, which LMCache may not have, and adds them to what is found
(0.3.11 lmcache_lookup_client.py:190-243). The sum is kept for the next question about the request, which may come with
less computed; and it counts as stored.

## Fix
The lookup asks for all chunks, as in the releases before and after.

## Releases
LMCache 0.3.10.post2 and 0.3.11.

## Upstream
None known; fixed in 0.3.12.

## Remove when
LMCache 0.3.11 is no longer in use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvfix import probe
from kvfix.correction import around
from kvfix.fix import Fix, Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType


def correct(module: ModuleType) -> Callable[..., Any]:
    @around
    def lookup(
        client: Any, token_ids: Any, lookup_id: str, request_configs: Any = None, num_computed_tokens: int = 0
    ) -> Generator[Any, Any, Any] | None:
        return _from_the_start(token_ids, lookup_id, request_configs) if num_computed_tokens else None

    return lookup


def _from_the_start(*arguments: Any) -> Generator[Any, Any, Any]:
    return (yield (*arguments, 0))


def shows_bug(hook: Callable[..., Any], module: ModuleType) -> bool:
    """All 512 tokens are computed. Wrong is to count them as found, and to ask nobody."""
    asked: list[Any] = []

    def ask(*_: Any, **__: Any) -> int:
        asked.append(1)
        return 0

    keys = SimpleNamespace(process_tokens=lambda *_, **__: [(0, 256, 1), (256, 512, 2)])
    socket = SimpleNamespace(send_multipart=ask, recv=lambda: bytes(8))
    client = SimpleNamespace(
        enable_blending=False,
        token_database=keys,
        encoder=SimpleNamespace(encode=lambda part: b""),
        num_ranks=1,
        sockets=[socket],
        lmcache_engine=SimpleNamespace(lookup=ask),
        reqs_status={},
    )
    hook(client, [0] * 512, probe.NAME, None, 512)
    return not asked


_CLIENT = "lmcache.v1.lookup_client.lmcache_lookup_client"
FIX = Fix(
    __name__,
    __doc__,
    patches=tuple(
        Patch("lmcache", module, f"{owner}.lookup", ">=0.3.10.post2,<0.3.12", shows_bug, correct)
        for module, owner in ((_CLIENT, "LMCacheLookupClient"), (f"{_CLIENT}_bypass", "LMCacheBypassLookupClient"))
    ),
)
