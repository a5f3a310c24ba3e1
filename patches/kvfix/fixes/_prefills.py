"""Which request of a decode engine gets what one prefill keeps: the first that asks. Of KVF340, KVF363 and KVF367.

Clients choose the ids, of any length, so only their hashes are kept. If two prefills had the same hash, the second
request would compute its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvfix.fixes import _closed
from kvfix.wrapping import after

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfix.wrapping import Wrapper

#: Prefills of which is known who gets them: the last ones. 1.5 MB.
_KEPT = 10_000
_FIRST = "_kvfix_first"


def is_to_load(request: Any) -> bool:
    """Whether its parameters ask for a remote prefill, and it has not been granted yet."""
    return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))


def first(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Note that the request gets this prefill, if none does yet. Whether it is the one."""
    known = vars(connector).setdefault(_FIRST, OrderedDict())
    name = hash(request.request_id)
    if known.setdefault(hash(prefill), name) != name:
        return False
    if len(known) > _KEPT:
        known.popitem(last=False)
    return True


def loads(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Whether the request gets this prefill. Else it is to compute its prompt."""
    if first(connector, prefill, request):
        return True
    compute(request)
    return False


def promise_if(reads: Callable[[Any, Any], bool]) -> Wrapper:
    """For `get_num_new_matched_tokens`: a request with a remote prefill gets its promise only if it reads the blocks.

    reads: (connector, request) -> whether it does.
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
    """Whether a request is noted for this prefill."""
    return hash(prefill) in getattr(connector, _FIRST, ())


def compute(request: Any) -> None:
    """Have it compute its prompt itself, as vLLM does once it has loaded.

    Else update_state_after_alloc takes a promise of 0 for a full hit, and reports a load; and the worker hears of a
    request that is aborted."""
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
