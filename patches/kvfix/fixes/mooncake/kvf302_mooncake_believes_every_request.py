"""EngineCore dies or a request waits for ever: MooncakeConnector does not check the parameters of a request.

Symptom: EngineCore dies with `assert not self.is_kv_producer` or `assert not self.is_kv_consumer` in a hook of
MooncakeConnector (before vLLM 0.20 `assert self.kv_role != ...`). Or the log has `Got invalid KVTransferParams: ...
This request will not utilize KVTransfer`, and the request stays in WAITING_FOR_REMOTE_KVS and keeps its blocks.

Cause: Any client that can reach the engine can set `kv_transfer_params`. A producer asserts that no request asks for a
load. A consumer asserts that no request asks for a send (mooncake_connector.py 0.32.0:1022, :1049, :1075).

get_num_new_matched_tokens promises the whole prompt (:1023). Only after vLLM has allocated the blocks,
MooncakeConnector checks whether the request names a peer. Without a peer, MooncakeConnector only logs a warning
(:1066). If a parameter is not a string, EngineCore dies, or the worker's event loop raises and the load never starts.

Fix: If a request asks for a transfer that this engine cannot do, or names no peer, the fix promises 0 tokens. The other
hooks skip the request, and the engine computes its prompt. If the bootstrap address is a number, the fix turns the
number into a string. The worker then cannot connect, and reports a failed load.
- Remove when: vLLM checks the parameters before it promises tokens.
"""

from collections.abc import Callable, Iterator

from kvfix.fixes import _mooncake, _prefills, api
from kvfix.fixes.api import PRIVATE, Any, Fix, Fixing, Steps, View, fix_around, instead, stubs

_ADDRESS = "remote_bootstrap_addr"


def _names(params: dict[str, Any], key: str) -> bool:
    """Return True if the value of `key` is a string. Also accept a numeric bootstrap address, and any `remote_port`."""
    if key == _ADDRESS and isinstance(params.get(key), int):
        return True
    return isinstance(params.get(key), str) or (key == "remote_port" and key in params)


def _is(scheduler: Any, role: str) -> bool:
    return bool(getattr(scheduler, f"is_{role}", False) or getattr(scheduler, "kv_role", "") == role)


def _of_other_role(scheduler: Any, request: Any, *_: Any) -> bool:
    """Return True if the request asks for a transfer that an engine of this role cannot do."""
    params = request.kv_transfer_params or {}
    if params.get("do_remote_prefill"):
        return _is(scheduler, "kv_producer")
    return bool(params.get("do_remote_decode")) and _is(scheduler, "kv_consumer")


def _promises(keys: tuple[str, ...]) -> Fixing:
    @fix_around(when=lambda scheduler, request, *_: _prefills.is_to_load(request))
    def get_num_new_matched_tokens(scheduler: Any, request: Any, *_: Any) -> Steps:
        named = all(_names(request.kv_transfer_params, key) for key in keys)
        return (yield) if named and not _of_other_role(scheduler, request) else (0, False)

    return get_num_new_matched_tokens


@fix_around(when=lambda scheduler, request, *_: request.kv_transfer_params)
def update_state_after_alloc(scheduler: Any, request: Any, *_: Any) -> Steps:
    """Turn a numeric bootstrap address into a string for the function that makes the metadata."""
    if _of_other_role(scheduler, request):
        return None
    yield
    params, waiting = request.kv_transfer_params, scheduler._reqs_need_recv
    if isinstance(params.get(_ADDRESS), int) and request.request_id in waiting:
        _, *blocks = waiting[request.request_id]
        with_text = View(request, kv_transfer_params={**params, _ADDRESS: str(params[_ADDRESS])})
        waiting[request.request_id] = with_text, *blocks


@fix_around(when=_of_other_role)
def request_finished(*_: Any) -> Steps:
    return instead((False, None))


def promises(hook: Any, module: Any) -> bool:
    """Look up a request for a remote prefill on an unnamed peer. With the bug, the hook promises tokens."""
    request = stubs.request(32, kv_transfer_params={"do_remote_prefill": True})
    return bool(hook(_mooncake.scheduler_side("kv_consumer"), request, 0)[0])


def _raises_with(*arguments: Any) -> Callable[[Any, Any], bool]:
    def raises(hook: Any, module: Any) -> bool:
        """Ask a consumer to send. With the bug, the hook raises AssertionError."""
        request = stubs.request(32, kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"})
        return stubs.raises(AssertionError, hook, _mooncake.scheduler_side("kv_consumer"), request, *arguments)

    return raises


def _targets(owner: Any, broken: str, keys: tuple[str, ...]) -> Iterator[Any]:
    yield owner.get_num_new_matched_tokens(broken=broken, probe=promises, fix=_promises(keys))
    yield owner.update_state_after_alloc(broken=broken, probe=_raises_with(None, 0), fix=update_state_after_alloc)
    yield owner.request_finished(broken=broken, probe=_raises_with(([],)), fix=request_finished)


FIX = Fix(
    *_targets(api.MOONCAKE_SCHEDULER_0_15, ">=0.15,<0.20", ("remote_host", "remote_port")),
    *_targets(api.MOONCAKE_SCHEDULER, ">=0.20", _mooncake.PEER),
    effect="crash",
    evidence={"KVR010": "", "KVD291": "", "KVD584": ""},
    scenarios=("mooncake-promise-without-peer",),
    no_patch=PRIVATE,
)
