"""Give the blocks of one prefill to the first request that asks for them. Shared by KVF340, KVF363 and KVF367.

Only hashes of the ids are kept: clients choose the ids, and these can be of any length. If two prefills have the same
hash, the second request computes its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvfix.fixes import _closed
from kvfix.wrapping import after

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.wrapping import Wrapper

#: Maximum prefills whose request is remembered. They take 1.5 MB.
_KEPT = 10_000
_FIRST = "_kvfix_first"


def is_to_load(request: Any) -> bool:
    """Return True if the request asks for a remote prefill that was not granted yet."""
    return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))


def first(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Return True if the request is the first one for this prefill."""
    known = vars(connector).setdefault(_FIRST, OrderedDict())
    name = hash(request.request_id)
    if known.setdefault(hash(prefill), name) != name:
        return False
    if len(known) > _KEPT:
        known.popitem(last=False)
    return True


def loads(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Return True if the request gets this prefill. Otherwise make it compute its prompt."""
    if first(connector, prefill, request):
        return True
    compute(request)
    return False


def promise_if(reads: Callable[[Any, Any], bool]) -> Wrapper:
    """For `get_num_new_matched_tokens`: a request with a remote prefill gets its promise only if `reads` returns True.

    reads: (connector, request) -> True if the request reads the blocks.
    """

    def get_num_new_matched_tokens(
        connector: Any, promise: tuple[int, bool], request: Any, *_: Any
    ) -> tuple[int, bool]:
        return promise if reads(connector, request) else (0, False)

    return after(
        get_num_new_matched_tokens,
        when=lambda connector, promise, request, *_: is_to_load(request),
        on_fault=_closed.compute,
    )


def has_another(connector: Any, prefill: tuple[Any, ...]) -> bool:
    """Return True if a request has asked for this prefill."""
    return hash(prefill) in getattr(connector, _FIRST, ())


def compute(request: Any) -> None:
    """Make the request compute its prompt: remove the remote prefill, as vLLM does after the load.

    Otherwise update_state_after_alloc treats a promise of 0 as a full hit and reports a load, and the worker is
    notified when the request is aborted.
    """
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
