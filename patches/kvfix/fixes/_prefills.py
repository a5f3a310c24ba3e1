"""Handle decode requests with a remote prefill, for the fixes of NixlConnector and MooncakeConnector.

Only the first request that asks for the blocks of a prefill gets the blocks (KVF340, KVF363, KVF367). kvfix keeps only
hashes of ids, because ids may be long. If two prefills have equal hashes, the later request computes its prompt.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvfix.fixes import _closed
from kvfix.fixes.api import Any, Fixing, fix_after, fix_before, note, stubs

_FIRST = "_kvfix_first"


def is_to_load(request: Any) -> bool:
    """Return True if the request asks for a remote prefill, and the connector has not started the load yet."""
    return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))


def first(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Return True if no other request has asked for this prefill before. kvfix remembers the newest 10,000 prefills."""
    known = vars(connector).setdefault(_FIRST, OrderedDict())
    name = hash(request.request_id)
    if known.setdefault(hash(prefill), name) != name:
        return False
    if len(known) > 10_000:  # 10,000 entries take 1.5 MB
        known.popitem(last=False)
    return True


def for_the_first(names: Callable[[Any, Any], tuple[Any, ...] | None]) -> tuple[Fixing, Fixing]:
    """Return two fixes that let only the first request for a prefill read the prefill's blocks.

    The first fix is for `get_num_new_matched_tokens`. The second fix is for a hook that runs before the decode engine
    tells the prefill engine about the request.
    names: takes the connector and the request's parameters. Returns the prefill, or None if the fixes do not apply.
    """

    def reads(connector: Any, request: Any) -> bool:
        prefill = names(connector, request.kv_transfer_params)
        if prefill is None or first(connector, prefill, request):
            return True
        compute(request)
        return False

    @fix_after(when=lambda connector, answer, request, *_: is_to_load(request), on_fault=_closed.compute)
    def get_num_new_matched_tokens(connector: Any, answer: tuple[int, bool], request: Any, *_: Any) -> tuple[int, bool]:
        return answer if reads(connector, request) else (0, False)

    @fix_before(when=lambda connector, request, *_: is_to_load(request), on_fault=_closed.compute_new)
    def tells_prefill(connector: Any, request: Any, *_: Any) -> bool:
        return not reads(connector, request)

    return get_num_new_matched_tokens, tells_prefill


def promised_twice(hook: Any, connector: Any, **params: Any) -> bool:
    """Return True if the hook `get_num_new_matched_tokens` promises one prefill to two requests."""
    given = {"do_remote_prefill": True, **params}
    requests = [stubs.request(32, kv_transfer_params={**given}, request_id=name) for name in ("a", "b")]
    return all(hook(connector, request, 0)[0] for request in requests)


def promise_if(is_right: Callable[[Any, Any], Any]) -> Fixing:
    """Return a fix that makes `get_num_new_matched_tokens` promise 0 tokens if `is_right` returns False."""

    @fix_after(when=lambda connector, answer, request, *_: answer[0] and request.kv_transfer_params)
    def get_num_new_matched_tokens(connector: Any, answer: tuple[int, bool], request: Any, *_: Any) -> tuple[int, bool]:
        return answer if is_right(connector, request) else (0, False)

    return get_num_new_matched_tokens


def drop_peerless(module_name: str, names_peer: Callable[[Any], bool]) -> Fixing:
    """Return a fix for `build_connector_meta`. The fix removes requests that name no peer from `_reqs_need_recv`."""

    @fix_before(when=lambda connector, *_, **__: connector._reqs_need_recv)
    def build_connector_meta(connector: Any, *_: Any) -> None:
        waiting = connector._reqs_need_recv
        for name in [name for name, entry in waiting.items() if not names_peer(entry[0].kv_transfer_params)]:
            note(module_name, f"request {name} names no peer")
            del waiting[name]

    return build_connector_meta


def has_another(connector: Any, prefill: tuple[Any, ...]) -> bool:
    """Return True if any request has asked for this prefill."""
    return hash(prefill) in getattr(connector, _FIRST, ())


def compute(request: Any) -> None:
    """Set `do_remote_prefill` to False, so that the request computes its prompt.

    If `do_remote_prefill` stays True, `update_state_after_alloc` can tell the prefill engine to free the blocks. After
    an abort, `request_finished` can also tell this to the prefill engine. Another request may still read the blocks.
    """
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
