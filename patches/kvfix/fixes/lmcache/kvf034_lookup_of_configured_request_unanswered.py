"""A request waits for the whole lookup timeout: the worker cannot decode a setting that is not a string.

Symptom: The worker logs `Error processing request from scheduler: Expected `str`, got `bool``. Then the scheduler logs
`Request ... is still waiting for async lookup after ... seconds`. The lookup client never drops the request's id.

Cause: A request may have settings for LMCache in its `kv_transfer_params`, such as `"lmcache.skip_save": true`. With
`enable_async_loading` the scheduler sends the settings in the lookup message. But LMCache declares the settings in a
lookup message as strings (0.5.6 async_lookup_message.py:22), so the worker cannot decode the message.

Fix: If a setting is not a string, the fix sends only settings that cache keys contain (`lmcache.tag.*`), as strings.
- Remove when: `LookupRequestMsg` takes settings of any type.
"""

from kvfix.fixes.api import ASYNC_LOOKUP_CLIENT, Any, Fix, Steps, fix_around, stubs


@fix_around(
    when=lambda client, token_ids, lookup_id, request_configs=None, *_, **__: (
        request_configs and not all(isinstance(value, str) for value in request_configs.values())
    )
)
def fix(client: Any, token_ids: Any, lookup_id: str, request_configs: dict[str, Any], *more: Any) -> Steps:
    tags = {name: str(value) for name, value in request_configs.items() if name.startswith("lmcache.tag.")}
    return (yield token_ids, lookup_id, tags or None, *more)  # more: num_computed_tokens in 0.3.11


def shows_bug(hook: Any, client: Any) -> bool:
    """Look up a request with a setting that is `True`. With the bug, the worker cannot decode the message."""
    import msgspec  # the client has already imported msgspec

    sent: list[bytes] = []
    keys = stubs.Stub(process_tokens=lambda *_, **__: [(0, 16, 1)])
    sockets = [stubs.Stub(send=lambda message, copy=True: sent.append(message))]
    stub = stubs.async_lookup_client(token_database=keys, push_sockets=sockets, reqs_status={})
    hook(stub, [0] * 16, stubs.NAME, {"lmcache.skip_save": True})
    return stubs.raises(msgspec.ValidationError, msgspec.msgpack.decode, sent[0], type=client.LookupRequestMsg)


FIX = Fix(
    ASYNC_LOOKUP_CLIENT.lookup(broken=">=0.3.10", probe=shows_bug, fix=fix),
    effect="hang",
    evidence={"KVR009": r"^lookup_client\.(aborted_lookups|reqs_status) "},
    scenarios=("async-lookup-of-configured",),
)
