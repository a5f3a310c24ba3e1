"""EngineCore dies or a request waits for ever: NixlConnector promises remote tokens without knowing their blocks.

Symptom: EngineCore of the decode engine dies with `assert num_external_tokens == 0` in `update_state_after_alloc`. Or
the log has `Got invalid KVTransferParams: ... This request will not utilize KVTransfer`, and the request stays in
WAITING_FOR_REMOTE_KVS and keeps its blocks.

Cause: The router or any client can set `kv_transfer_params`. If the parameters ask for a remote prefill,
get_num_new_matched_tokens promises the whole prompt (pull_scheduler.py 0.32.0:60). After the allocation of blocks,
update_state_after_alloc checks whether the parameters name remote blocks (:186, assertion) and the prefill engine
(:180, warning). The blocks are missing if prefill kept no blocks (KVF314). The parameters can also be incomplete if the
router is made for another release of vLLM, or if the request is malformed.

The worker raises during the load if the blocks are not in lists, or if the name of engine, request or host is not a
string. The worker also raises if the block ids are one flat list, in place of one list per KV group. The fix does not
refuse a flat list if the worker can report a failed load (KVF311). The load then fails, and vLLM handles the failure.

Fix: The fix promises 0 tokens for incomplete or malformed parameters. The request computes its prompt itself.
- Remove when: vLLM checks the parameters before it promises tokens.
"""

import inspect
import sys

from kvfix.fixes import _nixl, _prefills, api
from kvfix.fixes.api import NIXL_PULL_SCHEDULER, NIXL_SCHEDULER, NIXL_SCHEDULER_0_15, Any, Fix, Fixing, Owner, stubs

_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def _fix(owner: Owner) -> Fixing:
    def fix(module: Any) -> Any:
        scheduler = getattr(module, owner.name)
        keys = _asked_for(scheduler.update_state_after_alloc)
        # True if prefill sends one list of blocks per KV group. Up to vLLM 0.15, prefill sends one list in total.
        groups = str(getattr(scheduler.request_finished, "__annotations__", {}).get("block_ids")) != "list[int]"

        def is_complete(connector: Any, request: Any) -> bool:
            params = request.kv_transfer_params
            part: tuple[type, ...] = (list, tuple) if groups else (int,)
            if groups and _fails_loads(module):
                part += (int,)
            return all(key in params for key in keys) and _names_blocks(params, part)

        return _prefills.promise_if(is_complete)(module)

    return fix


def _names_blocks(params: Any, part: tuple[type, ...]) -> bool:
    """Return True if the parameters name blocks, and the names of engine, request and host are strings."""
    blocks, names = params.get("remote_block_ids"), (params.get(key, "") for key in _KEYS[:3])
    lists = isinstance(blocks, (list, tuple)) and all(isinstance(each, part) for each in blocks)
    return lists and any(each not in ([], ()) for each in blocks) and all(isinstance(name, str) for name in names)


def _fails_loads(module: Any) -> bool:
    """Return True if the worker can report a failed load. With KVF311, malformed blocks then fail only the load."""
    worker = sys.modules.get(module.__name__.replace("pull_scheduler", "pull_worker"))
    return hasattr(getattr(worker, "NixlPullConnectorWorker", None), "_handle_failed_transfer")


def _asked_for(function: Any) -> tuple[str, ...]:
    """Return the keys that update_state_after_alloc needs for a transfer. vLLM before 0.15 needs no request id."""
    constants = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_consts", ())
    return next((each for each in constants if isinstance(each, tuple) and _KEYS[0] in each), _KEYS)


def shows_bug(hook: Any, module: Any) -> bool:
    """Look up a remote prefill that names no blocks. With the bug, the connector promises the prefill's tokens."""
    request = stubs.request(32, kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": []})
    return bool(hook(_nixl.scheduler_side(), request, 0)[0])


FIX = Fix(
    NIXL_SCHEDULER_0_15.get_num_new_matched_tokens(
        broken=">=0.11.2,<0.20", probe=shows_bug, fix=_fix(NIXL_SCHEDULER_0_15)
    ),
    NIXL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.20,<0.26", probe=shows_bug, fix=_fix(NIXL_SCHEDULER)),
    NIXL_PULL_SCHEDULER.get_num_new_matched_tokens(broken=">=0.26", probe=shows_bug, fix=_fix(NIXL_PULL_SCHEDULER)),
    effect="crash",
    evidence={"KVD290": "", "KVD584": "", "KVR010": "", "KVR011": r"^update_state_after_alloc: AssertionError$"},
    scenarios=("nixl-promise-without-blocks", "nixl-promise-without-host"),
    no_patch=api.PRIVATE,
)
