"""Test KVF122 and KVF126 with LMCache's client and worker adapter, while the server ends or restarts."""

from typing import Any

import pytest

from tests.conftest import Fixes, answers

TRANSFERS = ["prepare_store", "commit_store", "prepare_retrieve", "commit_retrieve", "store", "retrieve"]
LOOKUPS = ["lookup", "query_prefetch_status"]


def connected() -> tuple[Any, Any, int, Any, Any]:
    """Return ZeroMQ's context, a socket in place of LMCache's server, the socket's port, a client and a chunk's key."""
    import zmq
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    context = zmq.Context()
    context.linger = 0  # ZeroMQ drops messages that it can no longer send
    context.rcvtimeo = 30_000
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=context)
    key = IPCCacheServerKey("model", 1, 0, token_ids=(1,) * 16, start=0, end=16, request_id="r")
    return context, server, port, client, key


@pytest.mark.parametrize(
    ("fixes", "patience", "answer"), [(False, 0, [False] * 5), (["KVF122"], 30, [False, True, False, True, False])]
)
@answers(also="fixes answer")
def test_the_load_has_failed_and_nothing_else(patience: float) -> list[bool]:
    """Return whether KVF122 sees the client as connected before an answer, after the answer, and after the server has
    closed the connection. Then return whether the load fails, and whether `get_chunk_size` ends."""
    from lmcache.v1.multiprocess.transport.zmq_impl.wire import decode_operation

    _, server, _, client, key = connected()
    queue = client._message_queue_client
    load, ping, question = client.retrieve(key, 1, [[3]], b"", 0), client.ping(1), client.get_chunk_size()
    stream = client.subscribe_kv_events(1, "model", 0, 8)
    requests = {decode_operation(message[2]): message for message in (server.recv_multipart() for _ in range(4))}
    found = [getattr(queue, "_kvfix_connected", False)]
    server.send_multipart([*requests["ping"][:3], b"\xc3"])  # True in msgpack
    ping.wait()
    found.append(getattr(queue, "_kvfix_connected", False))
    server.close(linger=0)
    assert list(stream) == []  # LMCache ends the stream when it notices that the connection is lost
    failed = load.wait(patience) and load.result() == (b"", False)
    found.append(getattr(queue, "_kvfix_connected", False))
    return [*found, failed, question.query()]


@pytest.mark.parametrize(
    ("fixes", "answer"),
    [
        (False, [[], [], [], [*TRANSFERS, *LOOKUPS, "ping"]]),
        (["KVF126"], [[*TRANSFERS, *LOOKUPS], TRANSFERS, [], [*LOOKUPS, "ping"]]),
    ],
)
@answers(also="answer")
def test_a_lost_connection(fixes: Fixes) -> list[list[str]]:
    """Send all operations three times: before the server ends, without a server, and after registering at a new server.
    Return three lists of operations that end without an answer, and the waiting operations that the new server gets."""
    import zmq
    from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload as Payload
    from lmcache.v1.multiprocess.transport.zmq_impl.wire import decode_operation

    context, server, port, client, key = connected()

    calls = {
        "prepare_store": (key, 1), "commit_store": (key, 1, b""), "prepare_retrieve": (key, 1),
        "commit_retrieve": (key, 1), "store": (key, 1, [[3]], b""), "retrieve": (key, 1, [[3]], b"", 0),
        "lookup": (key, 1), "query_prefetch_status": ("r",), "ping": (1,),
    }  # fmt: skip

    def send_all() -> dict[str, Any]:
        return {name: getattr(client, name)(*arguments) for name, arguments in calls.items()}

    def received(count: int) -> list[str]:
        operations: list[str] = []
        while len(operations) < count:
            message = server.recv_multipart()
            if message[2]:  # the message that cancels the stream names no operation
                operations.append(decode_operation(message[2]))
        return operations

    def done(futures: dict[str, Any]) -> list[str]:
        return [name for name, future in futures.items() if future.query()]

    in_flight = send_all()
    stream = client.subscribe_kv_events(1, "model", 0, 8)
    received(len(in_flight) + 1)
    server.close(linger=0)
    assert list(stream) == []  # LMCache ends the stream when it notices that the connection is lost
    lost = send_all()
    server = context.socket(zmq.ROUTER)
    server.bind(f"tcp://127.0.0.1:{port}")
    received_before = received(len(lost) - len(TRANSFERS) * bool(fixes))
    client.register_kv_cache_engine_driven_context(Payload(1, "model", 1, 1, 1, 1, "int8", False))
    behind = send_all()
    assert received(1 + len(behind))[1:] == list(behind)
    return [done(in_flight), done(lost), done(behind), received_before]


@pytest.mark.parametrize(
    ("fixes", "patience", "answer"), [(False, 1.0, [True, False, False]), (["KVF126"], 300.0, [True, False, True])]
)
@answers(also="fixes answer")
def test_a_restarted_server(patience: float) -> list[bool]:
    """Return whether a store succeeds before a restart, after the restart, and after a heartbeat. With KVF126,
    no store waits for a missing answer. A wait would take 2 * `patience` = 600 s, longer than the test may run."""
    import torch
    import zmq
    from lmcache.integration.vllm import vllm_multi_process_adapter as module

    from kvfix_tools.lab.connectors.server_process import ServerProcess

    server = ServerProcess("auto")
    alone = module.ParallelStrategy(False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
    settings = {"mq_timeout": patience, "heartbeat_interval": 3600.0}
    adapter = module.LMCacheMPWorkerAdapter(
        server.url, zmq.Context(), "model", 16, alone,
        extra_config={f"lmcache.mp.{name}": value for name, value in settings.items()},
    )  # fmt: skip
    adapter.register_kv_caches({f"layer {layer}": torch.rand(2, 8, 16, 1, 8) for layer in (1, 2)}, layout_hints={})

    def store(request_id: str, first: int) -> bool:
        op = module.LoadStoreOp(list(range(first, first + 32)), [[0, 1]], start=0, end=32)
        adapter.submit_store_request(request_id, op, adapter.create_recorded_event())
        future: Any = adapter.store_futures[request_id]
        return bool(future.result(60))

    stored = [store("before", 0)]
    server.kill()
    server.start()
    stored.append(store("after", 100))
    adapter._heartbeat._execute()
    stored.append(store("registered", 200))
    server.close()
    return stored
