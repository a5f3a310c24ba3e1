"""EngineCore dies or a request waits for ever: MooncakeConnector does not check the parameters of a request.

## Symptom
EngineCore dies with `assert not self.is_kv_producer` or `assert not self.is_kv_consumer` in a hook of MooncakeConnector
(before vLLM 0.20 `assert self.kv_role != ...`). Or the log has `Got invalid KVTransferParams: ... This request will not
utilize KVTransfer`, and the request stays in WAITING_FOR_REMOTE_KVS and keeps its blocks.

## Cause
The parameters come with the request, from the router or from any client that can reach the engine. A producer asserts
that no request asks it to load, and a consumer asserts that no request asks it to send (mooncake_connector.py
0.32.0:1022, :1048, :1076).

get_num_new_matched_tokens promises the whole prompt (:1023). MooncakeConnector checks only after the allocation of the
blocks whether the request names its peer. If the request does not, MooncakeConnector only logs a warning (:1049). If a
value is not a string, EngineCore dies, or the worker's own loop raises and the load never starts.

## Fix
If a request asks for a transfer that this engine cannot do, or names no peer, the fix promises no tokens. The hooks
skip the request, and the engine computes its prompt. If the bootstrap address is a number, the fix passes the number to
the worker as a string, and the load fails in the worker.

## Releases
vLLM 0.15.1 to 0.33.0.

## Upstream
None known in public: the bug is a security problem (SECURITY.md).

## Remove when
vLLM checks the parameters before it promises.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import ModuleType, SimpleNamespace
from typing import Any

from kvfix.fixes import _prefills, stubs
from kvfix.fixes.api import Fix
from kvfix.fixes.targets import MOONCAKE_SCHEDULER, MOONCAKE_SCHEDULER_0_15
from kvfix.wrapping import View, around, instead

_KEYS = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
_ADDRESS = _KEYS[1]
_KEYS_0_15 = ("remote_host", "remote_port")


def _names(params: dict[str, Any], key: str) -> bool:
    """True if the key exists, and its value has the type that vLLM expects without a check."""
    if key == _ADDRESS and isinstance(params.get(key), int):
        return True
    return isinstance(params.get(key), str) or (key == "remote_port" and key in params)


def _is(scheduler: Any, role: str) -> bool:
    return bool(getattr(scheduler, f"is_{role}", False) or getattr(scheduler, "kv_role", "") == role)


def _of_other_role(scheduler: Any, request: Any, *_: Any) -> bool:
    params = request.kv_transfer_params
    if not params:
        return False
    if params.get("do_remote_prefill"):
        return _is(scheduler, "kv_producer")
    return bool(params.get("do_remote_decode")) and _is(scheduler, "kv_consumer")


def _not_promised(keys: tuple[str, ...]) -> Callable[[ModuleType], Callable[..., Any]]:
    def get_num_new_matched_tokens(scheduler: Any, request: Any, *_: Any) -> Generator[None, Any, Any] | None:
        params = request.kv_transfer_params
        if _of_other_role(scheduler, request) or not all(_names(params, key) for key in keys):
            return instead((0, False))
        return None

    return lambda module: around(
        get_num_new_matched_tokens, when=lambda scheduler, request, *_: _prefills.is_to_load(request)
    )


def _no_state(module: ModuleType) -> Callable[..., Any]:
    def update_state_after_alloc(scheduler: Any, request: Any, *_: Any) -> Generator[None, Any, Any]:
        return instead(None) if _of_other_role(scheduler, request) else _with_text(scheduler, request)

    def concerns(scheduler: Any, request: Any, *_: Any) -> bool:
        params = request.kv_transfer_params
        return bool(params) and (isinstance(params.get(_ADDRESS), int) or _of_other_role(scheduler, request))

    return around(update_state_after_alloc, when=concerns)


def _with_text(scheduler: Any, request: Any) -> Generator[None, Any, Any]:
    """Pass the address as a string to the function that makes the metadata."""
    answer = yield
    name, params = request.request_id, request.kv_transfer_params
    if name in scheduler._reqs_need_recv:
        _, *blocks = scheduler._reqs_need_recv[name]
        with_text = View(request, kv_transfer_params={**params, _ADDRESS: str(params[_ADDRESS])})
        scheduler._reqs_need_recv[name] = with_text, *blocks
    return answer


def _nothing_to_send(module: ModuleType) -> Callable[..., Any]:
    def request_finished(*_: Any) -> Generator[None, Any, Any]:
        return instead((False, None))

    return around(request_finished, when=_of_other_role)


def _connector(role: str) -> Any:
    return SimpleNamespace(
        kv_role=role,
        is_kv_producer=role == "kv_producer",
        is_kv_consumer=role == "kv_consumer",
        _get_remote_prefill_token_count=lambda tokens: tokens,
        _reqs_need_recv={},
        _reqs_need_send={},
        _reqs_not_processed=set(),
    )


def promises(hook: Callable[..., Any], module: ModuleType) -> bool:
    """A remote prefill that names no peer. Wrong is to promise its tokens."""
    request = stubs.request(32, kv_transfer_params={"do_remote_prefill": True})
    return bool(hook(_connector("kv_consumer"), request, 0)[0])


def _raises(hook: Callable[..., Any], *arguments: Any) -> bool:
    """A consumer that is asked to send. Wrong is to raise."""
    params = {"do_remote_decode": True, "transfer_id": "t"}
    return stubs.raises(
        AssertionError,
        hook,
        _connector("kv_consumer"),
        stubs.request(32, kv_transfer_params=params, status=None),
        *arguments,
    )


def raises_after_alloc(hook: Callable[..., Any], module: ModuleType) -> bool:
    return _raises(hook, None, 0)


def raises_at_end(hook: Callable[..., Any], module: ModuleType) -> bool:
    return _raises(hook, ([],))


FIX = Fix(
    __name__,
    __doc__,
    effect="crash",
    targets=tuple(
        target
        for owner, broken, keys in (
            (MOONCAKE_SCHEDULER_0_15, ">=0.15,<0.20", _KEYS_0_15),
            (MOONCAKE_SCHEDULER, ">=0.20", _KEYS),
        )
        for target in (
            owner.get_num_new_matched_tokens(broken=broken, probe=promises, fix=_not_promised(keys)),
            owner.update_state_after_alloc(broken=broken, probe=raises_after_alloc, fix=_no_state),
            owner.request_finished(broken=broken, probe=raises_at_end, fix=_nothing_to_send),
        )
    ),
    evidence={"KVR010": "", "KVD291": "", "KVD584": ""},
    scenarios=("mooncake-promise-without-peer",),
    no_patch={"vllm": "it can be abused: vLLM's security channel comes before a public patch (SECURITY.md)"},
)
