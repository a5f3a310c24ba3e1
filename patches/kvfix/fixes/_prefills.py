"""Code that the fixes of NixlConnector and MooncakeConnector share, for the decode requests of a prefill.

The blocks of one prefill go to the first request that asks for them (KVF340, KVF363, KVF367). kvfix keeps hashes of the
ids, because a client may choose long ids. If two prefills have equal hashes, the second request computes its prompt.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvfix.fixes import _closed
from kvfix.fixes.api import Any, Fixing, fix_after, fix_before, note, stubs

_FIRST = "_kvfix_first"


def is_to_load(request: Any) -> bool:
    """Return True if the request asks for a remote prefill and vLLM has not allocated its blocks yet."""
    return bool(request.kv_transfer_params and request.kv_transfer_params.get("do_remote_prefill"))


def first(connector: Any, prefill: tuple[Any, ...], request: Any) -> bool:
    """Return True if the request is the first one for this prefill."""
    known = vars(connector).setdefault(_FIRST, OrderedDict())
    name = hash(request.request_id)
    if known.setdefault(hash(prefill), name) != name:
        return False
    if len(known) > 10_000:  # 10,000 entries take 1.5 MB
        known.popitem(last=False)
    return True


def for_the_first(names: Callable[[Any, Any], tuple[Any, ...] | None]) -> tuple[Fixing, Fixing]:
    """Let only the first request for a prefill read its blocks. Return two fixes.

    The first fix is for `get_num_new_matched_tokens`. The second fix is for a hook that runs before vLLM tells the
    prefill engine about the request.
    names: (connector, parameters of the request) -> the prefill. None: the fix does not handle this request.
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
    """For probes of `get_num_new_matched_tokens`: return True if the hook promises one prefill to two requests."""
    given = {"do_remote_prefill": True, **params}
    requests = [stubs.request(32, kv_transfer_params={**given}, request_id=name) for name in ("a", "b")]
    return all(hook(connector, request, 0)[0] for request in requests)


def promise_if(is_right: Callable[[Any, Any], Any]) -> Fixing:
    """For `get_num_new_matched_tokens`: promise 0 tokens if `is_right(connector, request)` returns False."""

    @fix_after(when=lambda connector, answer, request, *_: answer[0] and request.kv_transfer_params)
    def get_num_new_matched_tokens(connector: Any, answer: tuple[int, bool], request: Any, *_: Any) -> tuple[int, bool]:
        return answer if is_right(connector, request) else (0, False)

    return get_num_new_matched_tokens


def drop_peerless(module_name: str, names_peer: Callable[[Any], bool]) -> Fixing:
    """For `build_connector_meta`: forget waiting requests that name no peer, because there is no engine to notify."""

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
    """Make the request compute its prompt: remove the remote prefill, as vLLM does after the load.

    Otherwise update_state_after_alloc treats 0 promised tokens as a full hit and reports a load, even after an abort.
    """
    request.kv_transfer_params = {**request.kv_transfer_params, "do_remote_prefill": False}
